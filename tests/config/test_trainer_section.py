"""`[trainer]`: losses, optimizers and schedules are chosen by type, and their numbers are checked."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError
from headrace.config.trainer import LOSSES
from tests.config.run_files import MINIMAL, load_text, refusal, run


def problem(**trainer: Any) -> str:
    """The only line of the refusal."""
    with pytest.raises(ConfigError) as refusal:
        run(trainer=trainer)
    (line,) = str(refusal.value).splitlines()
    return line


def test_losses_have_the_defaults_of_the_spec():
    defaults: dict[str, dict[str, float]] = {
        "default": {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
        "ipo": {"ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
        "ppo_clip": {"eps_low": 0.2, "eps_high": 0.2},
        "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},
        "cispo": {"eps_max": 5.0},
        "icepop": {"alpha": 0.5, "beta": 5.0},
        "reinforce": {},
    }
    for kind, expected in defaults.items():
        trainer = run(trainer={"loss": {"type": kind}}).trainer
        assert trainer.loss.model_dump() == {"type": kind, **expected}


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        ({"type": "default", "kl_tau": -1}, "kl_tau"),
        ({"type": "ppo_clip", "eps_low": 1.5}, "eps_low"),
        ({"type": "ppo_clip", "eps_high": -0.1}, "eps_high"),
        ({"type": "gspo", "eps_low": -1e-4}, "eps_low"),
        ({"type": "cispo", "eps_max": 0}, "eps_max"),
        ({"type": "icepop", "alpha": -0.5}, "alpha"),
        ({"type": "custom"}, "import_path"),
        ({"type": "reinforce", "kl_tau": 0.1}, "kl_tau"),
    ],
)
def test_a_loss_with_a_wrong_key_or_number_is_refused(loss: dict[str, Any], key: str):
    assert refusal(trainer={"loss": loss}).key == f"trainer.loss.{key}"


def test_icepop_must_keep_some_ratio():
    error = refusal(trainer={"loss": {"type": "icepop", "alpha": 2.0, "beta": 1.0}})
    assert (error.key, error.value) == ("trainer.loss.alpha", 2.0)


@pytest.mark.parametrize(
    ("section", "known"),
    [
        ("optim", "no such optimizer. Known: adamw, muon, sgd"),
        ("scheduler", "no such scheduler. Known: constant, linear, cosine, cosine_with_restarts, wsd"),
    ],
)
def test_an_unknown_type_names_the_known_ones(section: str, known: str):
    error = refusal(trainer={section: {"type": "nonsense"}})
    assert error.key == f"trainer.{section}"
    assert known in error.fact
    assert error.value == {"type": "nonsense"}


def test_an_unknown_loss_names_the_known_ones():
    error = refusal(trainer={"loss": {"type": "nonsense"}})
    assert (error.key, error.value) == ("trainer.loss.type", "nonsense")
    assert all(name in (error.fix or "") for name in LOSSES.names)


@pytest.mark.parametrize("section", ["loss", "optim", "scheduler"])
def test_a_value_where_one_of_several_sections_belongs_is_refused(section: str):
    assert refusal(trainer={section: 3}).key == f"trainer.{section}"


def test_an_optimizer_without_a_type_is_adamw():
    assert run(trainer={"optim": {"lr": 0.1}}).trainer.optim.type == "adamw"
    assert run(trainer={"optim": {"type": "muon"}}).trainer.optim.momentum == 0.95


@pytest.mark.parametrize(
    ("optim", "key"),
    [
        ({"type": "sgd", "momentum": 1.0}, "momentum"),
        ({"type": "sgd", "betas": [0.9, 0.99]}, "betas"),
        ({"type": "muon", "ns_steps": 0}, "ns_steps"),
        ({"type": "muon", "weight_decay": -0.1}, "weight_decay"),
        ({"betas": [0.9, 1.0]}, "betas"),
        ({"momentum": 0.9}, "momentum"),
    ],
)
def test_an_optimizer_with_a_wrong_key_or_number_is_refused(optim: dict[str, Any], key: str):
    assert problem(optim=optim).startswith(f"run.toml: trainer.optim.{key}")


def test_nesterov_needs_momentum():
    assert refusal(trainer={"optim": {"type": "sgd", "nesterov": True}}).key == "trainer.optim.nesterov"


@pytest.mark.parametrize(
    ("scheduler", "key"),
    [
        ({"type": "wsd", "decay_steps": 0}, "decay_steps"),
        ({"type": "wsd", "decay_fraction": 1.5}, "decay_fraction"),
        ({"type": "wsd", "decay_shape": "cosine"}, "decay_shape"),
        ({"type": "cosine", "decay_steps": 5}, "decay_steps"),
        ({"type": "linear", "min_factor": 2}, "min_factor"),
    ],
)
def test_a_schedule_with_a_wrong_key_or_number_is_refused(scheduler: dict[str, Any], key: str):
    assert refusal(trainer={"scheduler": scheduler}).key == f"trainer.scheduler.{key}"


def test_types_may_be_chosen_on_the_command_line(tmp_path: Path):
    overrides = ["--trainer.loss.type", "ppo_clip", "--trainer.loss.eps_high", "0.28", "--trainer.optim.type", "muon"]
    config, _ = load_text(tmp_path, MINIMAL, *overrides, "--trainer.scheduler.type", "wsd")
    assert (config.trainer.loss.type, config.trainer.loss.eps_high) == ("ppo_clip", 0.28)
    assert (config.trainer.optim.type, config.trainer.scheduler.type) == ("muon", "wsd")


@pytest.mark.parametrize(
    ("given", "mode"),
    [(False, False), ("none", False), (True, "full"), ("full", "full"), ("selective", "selective")],
)
def test_activation_checkpointing_has_modes_and_true_is_full(given: Any, mode: Any):
    assert run(trainer={"activation_checkpointing": given}).trainer.activation_checkpointing == mode


def test_unknown_attention_and_checkpointing_are_refused_with_those_that_exist():
    assert "'auto', 'cudnn', 'flash' or 'sdpa'" in problem(attention="eager")
    assert "'full' or 'selective'" in problem(activation_checkpointing="some")


@pytest.mark.parametrize(
    ("trainer", "between_steps", "during_one"),
    [
        ({}, 4 + 8 + 2, 4 + 8 + 2 + 4),
        ({"optim": {"offload_state": True}}, 4 + 2, 4 + 2 + 4),
        ({"optim": {"state_bits": 8}}, 4 + 2 + 2, 4 + 2 + 2 + 4),
        ({"optim": {"type": "muon"}}, 4 + 4 + 2, 4 + 4 + 2 + 4),
        ({"model": {"dtype": "float32"}}, 4 + 8 + 4, 4 + 8 + 4 + 4),
        ({"weights": {"transport": "files"}}, 4 + 8, 4 + 8 + 4),
        ({"lora": {}}, 2.5, 2.5),
        ({"lora": {}, "model": {"dtype": "float32"}}, 4.5, 4.5),
    ],
)
def test_what_a_trainer_holds_on_its_gpu(trainer: dict[str, Any], between_steps: float, during_one: float):
    config = run(trainer=trainer).trainer
    assert config.bytes_per_parameter(while_training=False) == between_steps
    assert config.bytes_per_parameter(while_training=True) == during_one


@pytest.mark.parametrize("given", ["auto", "files", "link"])
def test_engines_elsewhere_read_files_unless_a_link_is_asked_for(given: str):
    weights: dict[str, Any] = {"weights": {"transport": given}}
    assert run(trainer=weights).trainer.weights.transport == given
    elsewhere = run(trainer=weights, orchestrator={"client": {"base_url": ["http://gpu:8000"]}})
    assert elsewhere.trainer.weights.transport == ("link" if given == "link" else "files")


def test_requests_wait_longer_for_engines_that_stand_still_for_the_trainer():
    client = run().orchestrator.client
    assert client.resolve_timeouts(alternating=False) == (600, 300)
    assert client.resolve_timeouts(alternating=True) == (3600, 3600)
    chosen = run(orchestrator={"client": {"timeout": 7, "retry_for": 0}}).orchestrator.client
    assert chosen.resolve_timeouts(alternating=False) == chosen.resolve_timeouts(alternating=True) == (7, 0)
