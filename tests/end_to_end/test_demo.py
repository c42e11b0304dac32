"""The demo as in the README, for three seeds: the long proof behind the README's curve."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.runs import REPOSITORY, headrace


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_held_out_reward_rises_by_a_third_and_ends_above_four_fifths(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    # The starting model gets the seed, too.
    start = (REPOSITORY / "examples/reverse-text/sft.toml").read_text()
    (tmp_path / "sft.toml").write_text(start.replace("max_steps", f"seed = {seed}\nmax_steps", 1))
    run = tmp_path / "run"
    code, output = headrace(
        "rl", "examples/reverse-text/rl.toml", "--output_dir", run, "--seed", seed,
        "--model.sft", tmp_path / "sft.toml", timeout=1500,
    )  # fmt: skip
    assert code == 0, output
    summary = json.loads(headrace("summary", run, "--json")[1])
    assert summary["reward_end"] >= 0.8
    assert summary["reward_end"] - summary["reward_start"] >= 0.35
