"""The card of a repository (`README.md`): what is in it and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.config.files import read_toml
from headrace.observe.summary import environment_table, run_title, summarize, summary_rows
from headrace.runfile.reading import leaves
from headrace.safe_text import markdown_table
from headrace.tools.hub.layout import CONFIG, RUN, hub_name
from headrace.transport.platform import read_platform
from headrace.transport.run_dir import RolloutKind, RunDir

LOADING = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}")
tokenizer = AutoTokenizer.from_pretrained("{repo}")
```"""
KINDS = {"dpo": "dpo", "data": "sft"}
"""Kinds of runs by a section that others do not have."""
KIND_NAMES = {"rl": "reinforcement learning", "sft": "supervised training", "dpo": "direct preference optimization"}
SHOWN_SETTINGS = (
    *("orchestrator.algo.type", "orchestrator.batch_size", "orchestrator.group_size", "orchestrator.max_async_level"),
    *("orchestrator.train.sampling.temperature", "orchestrator.train.sampling.max_tokens"),
    *("trainer.loss.type", "trainer.optim.lr", "trainer.optim.type", "trainer.lora.r"),
    *("dpo.loss", "dpo.beta", "optim.lr", "optim.type", "data.batch_size", "batch_size"),
    *("max_steps", "seq_len", "seed"),
)
"""Settings on the card; all are in the configuration file."""


def run_card(run: RunDir, repo: str, base: str | None, base_folder: str, files: Sequence[str]) -> str:
    """`base` is the hub name of the model that the run began with; None if that was `base_folder`."""
    tree = read_toml(run.config)
    kind = next((kind for key, kind in KINDS.items() if key in tree), "rl")
    began = f"`{base}`" if base else f"a local model, `{base_folder}`"
    values = leaves(tree)
    settings = [("key", "value"), *((key, str(values[key])) for key in SHOWN_SETTINGS if key in values)]
    named = [source["name"] for _, source in _sources(tree) if "id" not in source and "name" in source]
    datasets = sorted({name for name in named if hub_name(name)})
    model = ["The final model:", "", LOADING.format(repo=repo), ""] if "config.json" in files else []
    return "\n".join(
        [
            *_head({"library_name": "transformers", "base_model": base}, ["headrace", kind], datasets),
            *(f"# {run_title(run)}", ""),
            *(f"A run of {KIND_NAMES[kind]} with Headrace {__version__}. It began with {began}.", ""),
            *_results(run, files),
            *_data(tree),
            *("## Settings", "", *markdown_table(settings), ""),
            *(f"All of them are in [`{RUN}{CONFIG}`]({RUN}{CONFIG}).", "", *_platform(run)),
            *("## What is here", "", *model),
            *("The run, as a directory that `headrace summary` and `headrace eval` read:", ""),
            *_pulling(repo, run_title(run)),
        ]
    )


def model_card(name: str, repo: str) -> str:
    head = _head({"library_name": "transformers"}, ["headrace"])
    return "\n".join([*head, f"# {name}", "", "A model.", "", LOADING.format(repo=repo), ""])


def dataset_card(name: str, repo: str) -> str:
    return "\n".join([*_head({}, ["headrace"]), f"# {name}", "", *_pulling(f"--dataset {repo}", name)])


def rollouts_card(run: str, repo: str, files: Sequence[str]) -> str:
    """Make training and evaluation two splits of the dataset."""
    sentence = (
        f"What the run {run} sampled: a file per optimizer step (`train`) or evaluated version (`eval`), a row per "
        "rollout, with its messages, rewards, tokens and logprobs, and why it was dropped, if it was."
    )
    splits = []
    for split, kind in (("train", RolloutKind.TRAIN), ("eval", RolloutKind.EVAL)):
        pattern = f"data/{kind}*.parquet"
        if any(fnmatch(file, pattern) for file in files):
            splits += [f"  - split: {split}", f"    path: {pattern}"]
    mark, *head = _head({}, ["headrace", "rollouts"])
    configs = [mark, "configs:", "- config_name: default", "  data_files:", *splits, *head]
    pulling = _pulling(f"--dataset {repo}", f"{run}-rollouts")
    return "\n".join([*configs, f"# {run}: rollouts", "", sentence, "", *pulling])


def _head(facts: Mapping[str, str | None], tags: Sequence[str], datasets: Sequence[str] = ()) -> list[str]:
    lines = [f"{key}: {value}" for key, value in facts.items() if value]
    lines += ["datasets:", *(f"- {name}" for name in datasets)] if datasets else []
    return ["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---", ""]


def _results(run: RunDir, files: Sequence[str]) -> list[str]:
    if not run.metrics.is_file():
        return []
    plot = run.plot.name
    shown = [f"![Reward over optimizer steps]({plot})", ""] if plot in files else []
    summary = summarize(run)
    by_environment = [*markdown_table(environment_table(summary.environments)), ""] if summary.environments else []
    return ["## Results", "", *markdown_table([("", ""), *summary_rows(summary)]), "", *by_environment, *shown]


def _sources(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each table of a run file that names data, with what it is used for."""
    orchestrator = tree.get("orchestrator", {})
    yield from (("training", env) for env in orchestrator.get("train", {}).get("env", []))
    yield from ((use, tree[key]) for key, use in (("data", "training"), ("validation", "validation")) if key in tree)
    evals = [*orchestrator.get("eval", {}).get("env", []), *tree.get("eval", {}).get("env", [])]
    yield from (("evaluation", env) for env in evals)


def _data(tree: dict[str, Any]) -> list[str]:
    """Name environments and data files, and what selects from them, without the directories of a machine."""
    rows = [("used for", "source", "selection")]
    for use, source in _sources(tree):
        origin = next((source[key] for key in ("id", "env", "name", "path") if source.get(key)), None)
        if origin is not None:  # `validation.fraction` takes part of the training data
            options = {key: source[key] for key in ("split", "subset", "num_examples") if source.get(key)}
            options |= source.get("args", {})
            rows.append((use, _portable(origin), ", ".join(f"{k} = {_portable(v)}" for k, v in options.items())))
    return ["## Data", "", *markdown_table(rows), ""] if len(rows) > 1 else []


def _portable(value: Any) -> str:
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else str(value)


def _platform(run: RunDir) -> list[str]:
    if (platform := read_platform(run.platform)) is None:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in platform.versions.items())
    ranks = f"{platform.ranks} ranks" if platform.ranks > 1 else "1 rank"
    return [f"Trained with {versions}, on {platform.device} ({platform.machine}), {platform.dtype}, {ranks}.", ""]


def _pulling(what: str, directory: str) -> list[str]:
    return ["```", f"headrace pull {what} {directory}", "```", ""]
