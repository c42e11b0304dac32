"""Algorithms in real runs: a teacher that is not there, and every example. Several at once are in test_mixture.py."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from headrace.observe.metrics import read_metrics
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
    assert not RunDir(tmp_path / "run").rollouts.exists()


WORDS, CALCULATOR = "reverse-text/rl.toml", "calculator/rl.toml"
EXAMPLES: dict[str, tuple[list[str], dict[str, set[str]], str]] = {
    "max_rl": ([WORDS, "algorithms/max-rl.toml"], {"reverse-text": {"rl"}}, ""),
    "opsd": ([WORDS, "algorithms/opsd.toml"], {"reverse-text": {"ref_kl"}}, "algo/reverse-text/prefills"),
    "rlcsd": ([WORDS, "algorithms/rlcsd.toml"], {"reverse-text": {"rl"}}, "algo/reverse-text/modulated_fraction"),
    "penalty": ([WORDS, "algorithms/length-penalty.toml"], {"wordy": {"rl"}}, ""),
    "echo": ([CALCULATOR, "algorithms/echo.toml"], {"calculator": {"rl", "ce"}}, ""),
    "opd": ([WORDS, "algorithms/opd.toml"], {"reverse-text": {"ref_kl"}}, "algo/reverse-text/prefills"),
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
