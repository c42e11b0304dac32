"""Router replay is refused before a run starts where the engine returns no routes; when routes are recorded."""

from pathlib import Path
from typing import Any

import pytest

from headrace.launch.checks import Subject, check_model_support
from headrace.machine import VISIBLE_GPUS_VAR
from headrace.runfile.run import RunConfig
from tests.models.families import write_model


def refused_keys(model: Path, scratch: Path, **trainer: Any) -> list[str | None]:
    config = RunConfig(
        output_dir=scratch / "run",
        max_steps=1,
        seq_len=32,
        model={"name": str(model)},
        trainer=trainer,
        inference={"engine": "vllm"},
        orchestrator={"train": {"env": [{"id": "reverse-text"}]}},
    )
    return [problem.key for problem in check_model_support(Subject(config, scratch, model=model))]


@pytest.mark.parametrize(
    ("family", "mode", "gpus", "keys"),
    [
        ("qwen3_moe", "replay", "", ["trainer.router_replay"]),
        ("qwen3_moe", "record", "", ["trainer.router_replay"]),
        ("qwen3_moe", "off", "", []),
        ("qwen3_moe", None, "", []),
        ("qwen3_moe", "replay", "0", []),
        ("qwen3", "replay", "", []),
    ],
)
def test_vllm_on_cpus_trains_experts_but_replays_no_routes(
    family: str, mode: str | None, gpus: str, keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_GPUS_VAR, gpus)
    assert refused_keys(write_model(tmp_path / "model", family), tmp_path, router_replay=mode) == keys


def test_unset_the_embedded_engine_records_experts_and_an_engine_elsewhere_does_not(tmp_path: Path) -> None:
    base: dict[str, Any] = {"output_dir": tmp_path, "max_steps": 1, "seq_len": 32, "model": {"name": "model"}}
    train = {"env": [{"id": "reverse-text"}]}
    own = RunConfig(**base, orchestrator={"train": train})
    assert (own.trainer.router_replay, own.inference.routed_experts) == ("replay", True)
    elsewhere = RunConfig(**base, orchestrator={"train": train, "client": {"base_url": ["http://127.0.0.1:1"]}})
    assert (elsewhere.trainer.router_replay, elsewhere.orchestrator.routed_experts) == ("off", False)
