"""Algorithms in real runs: a teacher that is not there, and every example. Several at once are in test_mixture.py."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from headrace.algorithms.base import Algorithm, Survivor
from headrace.observe.metrics import read_metrics
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.run_dir import RolloutKind, RunDir
from tests.end_to_end.runs import REPOSITORY, headrace, start, wait_until, write_run_file

LETTERS = "tests.end_to_end.environments:Letters"
ENVIRONMENTS = """
[[orchestrator.train.env]]
id = "{letters}"
name = "rewarded"
ratio = 1.0

[[orchestrator.train.env]]
id = "{letters}"
name = "scored"
ratio = 1.0

[orchestrator.train.env.algo]
type = "opd"
teacher = {{ name = "teacher", base_url = "{url}", timeout = 10, retry_for = 0.2 }}

[[orchestrator.train.env]]
id = "{letters}"
name = "imitated"
ratio = 1.0
group_size = 1

[orchestrator.train.env.algo]
type = "sft"
teacher = {{ name = "teacher", base_url = "{url}", timeout = 10, retry_for = 0.2 }}
"""


@contextmanager
def served(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The model behind a port of its own, as `teacher`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start("serve", model, "--port", port, "--served_name", "teacher", "--renderer.enable_thinking", "false")
    try:
        wait_until(lambda: is_listening(port), "the teacher is up")
        yield server, f"http://127.0.0.1:{port}/v1"
    finally:
        server.kill()
        server.communicate()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def count(run: RunDir, metric: str) -> int:
    return sum(record.get(metric, 0) > 0 for record in read_metrics(run.metrics)) if run.metrics.is_file() else 0


def trained_components(run: RunDir) -> dict[str, set[str]]:
    """By environment, the losses that the tokens of shipped rollouts went to."""
    found: dict[str, set[str]] = {}
    for file in RolloutKind.TRAIN.files(run.rollouts).values():
        for row in pq.read_table(file).to_pylist():
            if row["drop_reason"] is None:
                names = {name for sample in row["samples"] for name in components(sample)}
                found.setdefault(row["env"], set()).update(names)
    return found


def components(sample: dict[str, list[float]]) -> set[str]:
    weighed = {name for name in ("rl", "ce", "ref_kl") if any(sample[f"{name}_weights"] or ())}
    return weighed | {"rl"} if sample["rl_weights"] is None else weighed


@pytest.mark.full
def test_a_missing_teacher_is_reported_before_anything_is_sampled(tmp_path: Path, tiny_model: Path):
    overlay = tmp_path / "algorithms.toml"
    overlay.write_text(ENVIRONMENTS.format(letters=LETTERS, url="http://127.0.0.1:9/v1"))
    code, output = headrace("rl", write_run_file(tmp_path, tiny_model), overlay)
    assert code != 0
    assert "model teacher cannot be used: http://127.0.0.1:9/v1" in output
    assert not [*RunDir(tmp_path / "run").rollouts.iterdir()]


TAUGHT = """
seq_len = 96

[[orchestrator.train.env]]
id = "{letters}"
name = "both"
ratio = 1.0

[orchestrator.train.env.algo]
type = "grpo_distill"
ref_kl_weight = 0.5
teacher = {{ name = "teacher", base_url = "{url}", timeout = 60 }}

[[orchestrator.train.env]]
id = "{letters}"
name = "judged"
ratio = 1.0

[orchestrator.train.env.algo]
type = "tests.end_to_end.test_algorithms:Judged"
teacher = "policy"

[[orchestrator.train.env]]
id = "tests.end_to_end.environments:SecondLetters"
name = "hinted"
ratio = 1.0
workers = 1

[orchestrator.train.env.algo]
type = "opsd"
"""


class Judged(Algorithm):
    """Credit is the share of letters in what the judge writes after the rollout, and how likely it finds the reply."""

    model_role = "judge"

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        for survivor in batch:
            ids = survivor.samples[0].token_ids
            scores = await self.teacher.score(ids, 1.0)
            verdict = await self.teacher.generate(ids, max_tokens=4, seed=0)
            letters = sum(32 <= token < 127 for token in verdict.token_ids) / len(verdict.token_ids)
            self.tally.mean("letters", letters, 1)
            survivor.assign_advantages(letters - float(scores.mean()))


@pytest.mark.full
def test_teachers_of_users_classes_two_losses_hints_and_masks_in_one_run(tmp_path: Path, tiny_model: Path):
    with served(tiny_model) as (_, url):
        overlay = tmp_path / "taught.toml"
        overlay.write_text(TAUGHT.format(letters=LETTERS, url=url))
        code, output = headrace("rl", write_run_file(tmp_path, tiny_model), overlay, timeout=600)
    assert code == 0, output
    run = RunDir(tmp_path / "run")
    assert trained_components(run) == {"both": {"rl", "ref_kl"}, "judged": {"rl"}, "hinted": {"ref_kl"}}
    assert count(run, "algo/judged/letters") and count(run, "algo/hinted/prefills")
    assert not count(run, "algo/hinted/hints_apart")
    hinted = [
        saved.rollout
        for step in RolloutFiles(run.rollouts).steps()
        for saved in RolloutFiles(run.rollouts).read(step)
        if saved.rollout.env == "hinted"
    ]
    for rollout in hinted:
        assert rollout.trained_tokens == len(rollout.turns[-1].completion_ids) - 1
        for sample in rollout.samples:
            weights = sample.streams.get("ref_kl_weights", np.zeros(len(sample)))
            assert not np.any(weights[~sample.mask])
    assert hinted


WORDS, CALCULATOR = "reverse-text/rl.toml", "calculator/rl.toml"
EXAMPLES: dict[str, tuple[list[str], dict[str, set[str]], str]] = {
    "max_rl": ([WORDS, "algorithms/max-rl.toml"], {"reverse-text": {"rl"}}, ""),
    "opsd": ([WORDS, "algorithms/opsd.toml"], {"reverse-text": {"ref_kl"}}, "algo/reverse-text/prefills"),
    "rlcsd": ([WORDS, "algorithms/rlcsd.toml"], {"reverse-text": {"rl"}}, "algo/reverse-text/modulated_fraction"),
    "penalty": ([WORDS, "algorithms/length-penalty.toml"], {"wordy": {"rl"}}, ""),
    "echo": ([CALCULATOR, "algorithms/echo.toml"], {"calculator": {"rl", "ce"}}, ""),
    "opd": ([WORDS, "algorithms/opd.toml"], {"reverse-text": {"ref_kl"}}, "algo/reverse-text/prefills"),
    "grpo_distill": (
        [WORDS, "algorithms/grpo-distill.toml"],
        {"reverse-text": {"rl", "ref_kl"}},
        "algo/reverse-text/prefills",
    ),
    "sft": ([WORDS, "algorithms/sft-distillation.toml"], {"reverse-text": {"ce"}}, ""),
    "mixed": ([WORDS, "algorithms/mixed.toml"], {"short": {"rl"}, "long": {"ref_kl"}}, "algo/long/prefills"),
    "custom": (["custom-algorithm/rl.toml"], {"reverse-text": {"rl"}}, "algo/reverse-text/solved"),
    "mixture": (
        ["mixture/rl.toml"],
        {name: {"rl"} for name in ("words", "long", "single", "short")},
        "curriculum/words/normal",
    ),
}
"""Of each its files, the losses of its environments, and what it counts."""


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_learns_by_the_losses_of_its_algorithm(
    example: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names, losses, counted = EXAMPLES[example]
    shared = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("HEADRACE_CACHE", str(shared / "cache"))
    files = [REPOSITORY / "examples" / name for name in names]
    run = tmp_path / "run"
    if "8001" not in files[-1].read_text():
        code, output = headrace("rl", *files, "--output_dir", run, timeout=3000)
    else:
        with served(teacher_model(shared / "teacher")) as (_, url):
            taught = tmp_path / "taught.toml"
            taught.write_text(files[-1].read_text().replace("http://127.0.0.1:8001/v1", url))
            code, output = headrace("rl", files[0], taught, "--output_dir", run, timeout=3000)
    assert code == 0, output
    summary = json.loads(headrace("summary", run, "--json")[1])
    assert summary["reward_end"] >= 1.3 * summary["reward_start"]
    assert trained_components(RunDir(run)) == losses
    assert not counted or count(RunDir(run), counted) > 10
    if example == "penalty":
        lengths = [
            record["decode_len/all/mean"]
            for record in read_metrics(run / "metrics.jsonl")
            if "reward/all/mean" in record
        ]
        assert lengths[-1] < 0.7 * lengths[0]


def teacher_model(output: Path) -> Path:
    """As examples/algorithms/teacher.toml says, made once."""
    if not (output / "model").is_dir():
        folder = REPOSITORY / "examples"
        files = [folder / "reverse-text" / "sft.toml", folder / "algorithms" / "teacher.toml"]
        code, said = headrace("sft", *files, "--output_dir", output, timeout=3000)
        assert code == 0, said
    return output / "model"
