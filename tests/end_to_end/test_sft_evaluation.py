"""An SFT run that evaluates: trainer, inference server and orchestrator as real processes."""

from pathlib import Path

import pytest

from headrace.observe.metrics import read_metrics
from headrace.transport.run_dir import RunDir
from tests.end_to_end.gated import BATCH, evaluated
from tests.end_to_end.runs import headrace, processes_of

RUN_FILE = """
output_dir = "{run.root}"
max_steps = 8
seq_len = 48

[model]
name = "{model}"

[renderer]
name = "qwen3"
enable_thinking = false

[data]
env = "tests.end_to_end.gated:Gated"
args = {{ run = "{run.root}" }}
batch_size = {batch}

[optim]
lr = 1e-3

[eval]
interval = 2

[eval.sampling]
max_tokens = 8

[[eval.env]]
id = "tests.end_to_end.gated:Gated"
name = "words"
args = {{ run = "{run.root}", split = "eval" }}
"""


@pytest.mark.full
@pytest.mark.timeout(400)
def test_versions_are_evaluated_while_training_goes_on_and_the_last_one_before_the_run_ends(
    tmp_path: Path, tiny_model: Path
):
    run = RunDir(tmp_path / "run")
    (tmp_path / "sft.toml").write_text(RUN_FILE.format(run=run, model=tiny_model, batch=BATCH))
    code, output = headrace("sft", tmp_path / "sft.toml", timeout=300)
    assert code == 0, output
    records = list(read_metrics(run.metrics))
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 9))
    versions = [evaluated(record) for record in records if evaluated(record) >= 0]
    assert versions == sorted(set(versions))
    # Which is offered second depends on whether the orchestrator was there before step 2 or after it.
    first, second, *_, last = versions
    assert (first, last) == (0, 8) and second in (2, 4) and set(versions) <= {0, second, 6, 8}
    for record in records:
        if evaluated(record) >= 0:  # each from one version, whatever was published meanwhile
            sampled = (record["eval/words/version/min"], record["eval/words/version/max"])
            assert sampled == (record["step"], record["step"])
    # Steps 3 and 4 were trained during the first evaluation, and the second came before step 5.
    order = [("eval", evaluated(r)) if evaluated(r) >= 0 else ("step", r["step"]) for r in records]
    moments = [("step", 4), ("eval", 0), ("eval", second), ("step", 5)]
    assert sorted(moments, key=order.index) == moments
    assert "held-out reward" in output
    assert run.final_model.is_dir()
    assert not processes_of(run.root)
