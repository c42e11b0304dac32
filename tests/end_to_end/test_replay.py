"""Steps of real runs, replayed by the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.tools.replay.source import open_run
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import REPOSITORY, headrace

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SHORT = (
    *("--max_steps", 4, "--orchestrator.batch_size", 32, "--orchestrator.eval.num_examples", 4),
    *("--trainer.ckpt.interval", 2, "--trainer.token_export.interval", 1),
)


def train(run: RunDir, model: Path, *options: object) -> None:
    """Run the example of reverse-text for a few steps, on a model with random weights."""
    file = REPOSITORY / "examples" / "reverse-text" / "rl.toml"
    code, output = headrace("rl", file, "--output_dir", run.root, "--model.name", model, *SHORT, *options, timeout=400)
    assert code == 0, output


def replay(*arguments: object) -> tuple[int, dict[str, Any]]:
    code, output = headrace("replay", *arguments, "--json")
    assert code in (0, 1), output
    return code, json.loads(output.splitlines()[-1])


def test_a_step_of_reverse_text_is_bit_equal_from_its_checkpoint_and_from_a_bundle(tmp_path: Path, tiny_model: Path):
    run, bundle = RunDir(tmp_path / "run"), tmp_path / "step.bundle"
    train(run, tiny_model)
    source = open_run(run.root, 3)
    assert run.batches.steps() == []
    assert [source.is_as_shipped(source.batch(step)) for step in (1, 2, 3, 4)] == [True] * 4
    code, report = replay(run.root, 3, "--tolerance", 0, "--bundle", bundle)
    assert (code, report["verdict"], report["start"]) == (0, "bit-equal", "checkpoints/step-00000002")
    assert report["tokens"][0]["tokens"] == report["anatomy"]["components"][0]["tokens"] > 100
    code, report = replay(bundle, "--tolerance", 0)
    assert (code, report["verdict"], report["step"]) == (0, "bit-equal", 3)


def test_a_step_of_two_ranks_is_replayed_by_one_up_to_rounding(tmp_path: Path, tiny_model: Path):
    run = RunDir(tmp_path / "run")
    # Adam would turn the rounding of gradients near its eps into visible steps.
    train(run, tiny_model, "--launch.trainer_processes", 2, "--trainer.optim.type", "sgd")
    code, report = replay(run.root, 4)
    assert (code, report["recorded_platform"]["ranks"], report["platform"]["ranks"]) == (0, 2, 1)
    assert report["tokens"][0]["tokens"] == report["anatomy"]["components"][0]["tokens"]
