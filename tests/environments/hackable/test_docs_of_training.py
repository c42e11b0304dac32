"""The algorithm of docs/tutorials/algorithm.md and the loss of docs/how-to/hacking.md, as files of a user's own."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import pytest
import torch

from headrace.cli.main import main
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from headrace.trainer.loss import PackedInputs
from headrace.trainer.rl import make_losses

DOCS = Path(__file__).parents[3] / "docs"
ALGORITHM = (DOCS / "tutorials/algorithm.md").read_text()
LOSS = (DOCS / "how-to/hacking.md").read_text().partition("## A loss\n")[2].partition("\n## ")[0]
CODE = [re.findall(r"```python[^\n]*\n(.*?)```", part, re.DOTALL)[0] for part in (ALGORITHM, LOSS)]
SETTINGS = [tomllib.loads(re.findall(r"```toml[^\n]*\n(.*?)```", part, re.DOTALL)[0]) for part in (ALGORITHM, LOSS)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run file with both of them, beside `best.py` and `mine.py`."""
    algorithm, loss = SETTINGS
    for name, code in zip(("best.py", "mine.py"), CODE, strict=True):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tree = {
        "output_dir": "run",
        "max_steps": 1,
        "seq_len": 64,
        "model": {"init": "tiny"},
        "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}, **algorithm["orchestrator"]},
        "trainer": loss["trainer"],
    }
    return validate(RunConfig, tree, "docs")[0]


def test_the_algorithm_is_found_by_a_run_file_and_holds_what_every_algorithm_must(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
):
    (env,) = config.orchestrator.train.env
    config.orchestrator.algo_of(env).check_imports()
    assert main(["check-algorithm", "best.py:BestOfGroup"]) == 0
    assert "best:BestOfGroup" in capsys.readouterr().out


def test_the_loss_trains_as_the_page_says(config: RunConfig):
    """Two tokens, of which the first is a member: -exp(0.4 * 0.25) * 2 * -0.5, with a gradient of -exp(0.1) * 2."""
    logprobs = torch.tensor([-0.5, -1.0], requires_grad=True)
    inputs = PackedInputs(
        logprobs,
        torch.tensor([-0.9, -1.0]),
        None,
        torch.tensor([2.0, 2.0]),
        torch.tensor([True, False]),
        sequences=torch.tensor([0, 0]),
    )
    outputs = make_losses(config.trainer)["rl"](inputs)
    assert outputs.loss.item() == pytest.approx(math.exp(0.1))
    outputs.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2 * math.exp(0.1), 0.0])
    total, count = outputs.metrics["tempered_ratio"]
    assert (total.item(), count.item()) == (pytest.approx(math.exp(0.1)), 1)
