"""Later sources: choose another alternative, change a type, take a key back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import Config, ConfigError
from headrace.config.files import dump
from headrace.config.sft import SftConfig
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from tests.config.run_files import MINIMAL, run

SHORT = """
model: org/model
data: {provider: arithmetic, eval: {interval: 5}}
trainer: {max_steps: 10, learning_rate: 1e-5, warmup_ratio: 0.1, num_generations: 4, bf16: true, batch_size: 16}
objective: {name: token_grpo}
"""
SFT = 'max_steps = 1\nseq_len = 8\nmodel.init = "tiny"\n[data]\nname = "a/b"\nsplit = "train"\ncolumns.prompt = "q"\n'


def loaded(kind: type[Config], directory: Path, text: str, *sources: str) -> Any:
    """Load `text`, then each source: words of the command line, or the text of a further TOML file."""
    first = directory / ("first.yaml" if text is SHORT else "first.toml")
    first.write_text(text)
    files, words = [first], []
    for number, source in enumerate(sources):
        if source.startswith("--"):
            words += source.split(" ", 1)
        else:
            files.append(directory / f"{number}.toml")
            files[-1].write_text(source)
    return load(kind, files, words)[0]


def at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[int(part)] if part.isdecimal() else getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("kind", "text", "source", "values"),
    [
        (RunConfig, MINIMAL, "--model.init tiny", {"model.init": "tiny", "model.name": None}),
        (RunConfig, MINIMAL, 'model.sft = "/s.toml"', {"model.sft": Path("/s.toml"), "model.name": None}),
        (RunConfig, MINIMAL, 'orchestrator.policy.init = "tiny"', {"model.init": "tiny", "model.name": None}),
        (
            RunConfig,
            MINIMAL + "[orchestrator]\nbatch_size = 16\n",
            "--orchestrator.token_batch_size 99",
            {"orchestrator.batch_size": None, "orchestrator.token_batch_size": 99},
        ),
        (
            RunConfig,
            MINIMAL + "[orchestrator]\npost_batch_filters = []\n",
            '--orchestrator.filters [{type = "gibberish"}]',
            {"orchestrator.post_batch_filters.0.type": "gibberish"},
        ),
        (
            RunConfig,
            MINIMAL + '[trainer.scheduler]\ntype = "wsd"\ndecay_steps = 3\n',
            "--trainer.scheduler.decay_fraction 0.5",
            {"trainer.scheduler.decay_steps": None, "trainer.scheduler.decay_fraction": 0.5},
        ),
        (RunConfig, SHORT, "--model.name other", {"model.name": "other"}),
        (RunConfig, SHORT, "--model.name_or_path other", {"model.name": "other"}),
        (RunConfig, SHORT, "--trainer.optim.lr 1e-3", {"trainer.optim.lr": 1e-3}),
        (RunConfig, SHORT, "--trainer.lr 1e-3", {"trainer.optim.lr": 1e-3}),
        (RunConfig, SHORT, "--trainer.warmup_steps 7", {"trainer.scheduler.warmup_steps": 7}),
        (RunConfig, SHORT, "--orchestrator.group_size 2", {"orchestrator.group_size": 2}),
        (RunConfig, SHORT, "--generation.num_generations 2", {"orchestrator.group_size": 2}),
        (RunConfig, SHORT, "--orchestrator.token_batch_size 99", {"orchestrator.token_batch_size": 99}),
        (RunConfig, SHORT, "--trainer.per_device_train_batch_size 8", {"orchestrator.batch_size": 8}),
        (RunConfig, SHORT, "--model.dtype float32", {"model.dtype": "float32"}),
        (RunConfig, SHORT, "--trainer.eval_steps 9", {"orchestrator.eval.interval": 9}),
        (
            RunConfig,
            SHORT,
            "--data.class_path tests.environments.hackable.plugins:numbers",
            {"orchestrator.train.env.0.args": {"provider": "tests.environments.hackable.plugins:numbers"}},
        ),
        (SftConfig, SFT, "--model.name other", {"model.name": "other", "model.init": None}),
        (
            SftConfig,
            SFT,
            "--data.env reverse-text",
            {"data.env": "reverse-text", "data.name": None, "data.split": None},
        ),
        (SftConfig, SFT, '[data]\npath = "/d.jsonl"', {"data.path": Path("/d.jsonl"), "data.columns.prompt": "q"}),
        (
            SftConfig,
            SFT,
            "--data.columns.messages chat",
            {"data.columns.messages": "chat", "data.columns.prompt": None},
        ),
    ],
)
def test_a_later_choice_replaces_the_earlier_one(
    kind: type[Config], text: str, source: str, values: dict[str, Any], tmp_path: Path
):
    config = loaded(kind, tmp_path, text, source)
    for key, value in values.items():
        found = at(config, key)
        assert found == value if not isinstance(value, dict) else value.items() <= found.items()


@pytest.mark.parametrize(
    ("earlier", "source", "key", "values"),
    [
        ("[trainer.loss]\nkl_tau = 0.1\nadv_tau = 2\n", "--trainer.loss.type cispo", "trainer.loss", {"eps_max": 5.0}),
        ("[trainer.loss]\nkl_tau = 0.1\n", "--trainer.loss.type ipo", "trainer.loss", {"kl_tau": 0.1}),
        ("[trainer.optim]\nbetas = [0, 0]\nlr = 2\n", "--trainer.optim.type sgd", "trainer.optim", {"lr": 2}),
        (
            '[trainer.scheduler]\ntype = "wsd"\ndecay_steps = 2\n',
            "--trainer.scheduler.type linear",
            "trainer.scheduler",
            {},
        ),
        ('[orchestrator.algo]\nlength_penalty = "turns"\n', "--orchestrator.algo.type max_rl", "orchestrator.algo", {}),
        ('[orchestrator.algo]\nlength_penalty = "turns"\n', '[orchestrator]\nalgo = "max_rl"', "orchestrator.algo", {}),
        (
            '[orchestrator.algo]\nnormalize = "std"\n',
            "--orchestrator.algo.type a.b:C",
            "orchestrator.algo",
            {"kwargs": {}},
        ),
        (
            '[orchestrator]\nalgo = "rlcsd"\n',
            "--orchestrator.algo.tau 0.5",
            "orchestrator.algo",
            {"type": "rlcsd", "tau": 0.5},
        ),
    ],
)
def test_keys_that_only_an_earlier_type_has_go_with_it(
    earlier: str, source: str, key: str, values: dict[str, Any], tmp_path: Path
):
    section = at(loaded(RunConfig, tmp_path, MINIMAL + earlier, source), key)
    assert {name: getattr(section, name) for name in values} == values


def test_two_choices_in_one_source_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        loaded(RunConfig, tmp_path, MINIMAL, "--model.init tiny", "--model.sft s.toml")
    assert refused.value.key == "--model.sft"


@pytest.mark.parametrize("source", ["--orchestrator.eval null", '[orchestrator]\neval = "null"'])
def test_null_takes_a_key_back(source: str, tmp_path: Path):
    evaluated = MINIMAL + '[orchestrator.eval]\ninterval = 3\n[[orchestrator.eval.env]]\nid = "copy"\n'
    assert loaded(RunConfig, tmp_path, evaluated).orchestrator.eval.interval == 3
    assert dump(loaded(RunConfig, tmp_path, evaluated, source)) == dump(run())
