"""`headrace tokens`: the largest gradients of a step, a sample token by token, and what is refused."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.cli.main import main, parse
from headrace.errors import BadInput
from headrace.launch.saved_config import read_rl_run
from headrace.observe.token_view import read_tokens
from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.packing import pack
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.ranks import Ranks
from headrace.trainer.token_table import write_token_table
from headrace.trainer.tokens import StepTokens, TokenTrace
from headrace.transport.run_dir import RunDir
from tests.cli.run_files import RUN_FILE
from tests.trainer.training_samples import make_sample


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> RunDir:
    """A run with the tokens of steps 10 and 20: of two samples, the first of which is masked at its last token."""
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.config.write_text(RUN_FILE.format(output=run.root, model=tiny_model))
    for step in (10, 20):
        export(run, step)
    return run


def export(run: RunDir, step: int, limit: int | None = None) -> None:
    """What a step would leave whose gradients are -0.1 and 0 for the first sample, 0.2, 0.3 and 0.4 for the second."""
    tokenizer = Tokenizer(read_rl_run(run.root).model.name or "")
    words = ("say:ab", "say:c d")
    samples = [
        make_sample(tokenizer.encode(text), 4, advantages=[0] * 4 + [credit] * (len(text) - 4))
        for text, credit in zip(words, (0.5, -1.0), strict=True)
    ]
    entries = [BatchSample(s, env, n) for n, (s, env) in enumerate(zip(samples, "xy", strict=True))]
    tokens = StepTokens(pack([entry.sample for entry in entries], 64))
    trace = TokenTrace(tokens, {"rl": 5, "ce": 0, "ref_kl": 0})
    first = np.repeat(tokens.sources, tokens.lengths) == 0
    trace.masked["rl"] = np.zeros(len(tokens), np.bool_)
    for inside, gradients, masked in ((first, [-0.1, 0.0], [0, 1]), (~first, [0.2, 0.3, 0.4], [0, 0, 0])):
        trace.gradients[tokens.scored & inside] = gradients
        trace.masked["rl"][tokens.scored & inside] = masked
    trace.logprobs[tokens.scored] = -0.7 + np.log(1.5)
    write_token_table(run.tokens.path(step), trace, Batch(step, 0, entries), Ranks(), limit)


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> list[list[str]]:
    """The cells of each token's line; the empty ones are left out."""
    assert main(["tokens", *map(str, words)]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(number for number, line in enumerate(lines) if line.startswith("env"))
    return [line.split() for line in lines[heading + 1 :]]


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["tokens", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_the_largest_gradients_of_a_step_come_first_with_their_share(run: RunDir, capsys: pytest.CaptureFixture[str]):
    lines = shown(capsys, run.root, 10, "--top", 3)
    number = ["-1.000", "-0.295", "-0.700", "1.500"]
    assert lines == [
        ["y", "1", "6", "'d'", "rl", *number, "+4.0e-01", "40.00%"],
        ["y", "1", "5", "'", "'", "rl", *number, "+3.0e-01", "30.00%"],
        ["y", "1", "4", "'c'", "rl", *number, "+2.0e-01", "20.00%"],
    ]
    assert len(shown(capsys, run.root, 10)) == 5  # context has no gradient to rank


def test_a_sample_is_shown_token_by_token(run: RunDir, capsys: pytest.CaptureFixture[str]):
    lines = shown(capsys, run.root, 10, "--sample", 0)
    assert [line[3] for line in lines] == ["'s'", "'a'", "'y'", "':'", "'a'", "'b'"]
    assert lines[0] == ["x", "0", "0", "'s'", "+0.000"]
    assert lines[4] == ["x", "0", "4", "'a'", "rl", "+0.500", "-0.295", "-0.700", "1.500", "-1.0e-01", "10.00%"]
    assert lines[5][4] == "[rl]"  # masked
    assert [line[3] for line in shown(capsys, run.root, 10, "--sample", 0, "--top", 1)] == ["'a'"]


def test_the_newest_step_is_shown_by_default(run: RunDir, capsys: pytest.CaptureFixture[str]):
    assert main(["tokens", str(run.root)]) == 0
    assert "step 20; tokens trained: 5 by rl" in capsys.readouterr().out


def test_a_step_without_tokens_names_those_that_have_them(run: RunDir):
    with pytest.raises(BadInput, match="10, 20") as error:
        read_tokens(run.tokens, 11)
    assert (error.value.key, error.value.value) == ("STEP", 11)
    assert error.value.fix is not None


def test_a_run_without_exported_tokens_names_the_key(run: RunDir, capsys: pytest.CaptureFixture[str]):
    shutil.rmtree(run.tokens.directory)
    with pytest.raises(BadInput) as error:
        read_tokens(run.tokens, None)
    assert error.value.key == "trainer.token_export"
    assert error.value.fix is not None
    assert refusal(capsys, run.root).count("trainer.token_export: ") == 1


@pytest.mark.parametrize(("limit", "there"), [(None, "0 to 1"), (1, "1")])
def test_a_sample_that_was_not_exported_is_refused(run: RunDir, limit: int | None, there: str):
    export(run, 30, limit)
    with pytest.raises(BadInput, match=rf"has samples {there}\.") as error:
        read_tokens(run.tokens, 30, 2)
    assert (error.value.key, error.value.value) == ("--sample", 2)


def test_a_part_of_the_sequences_is_marked_as_such(run: RunDir, capsys: pytest.CaptureFixture[str]):
    export(run, 30, 1)
    assert len(shown(capsys, run.root)) == 3
    assert main(["tokens", str(run.root)]) == 0
    assert "of 2 sequences those with the largest gradients" in capsys.readouterr().out
    assert main(["tokens", str(run.root), "20"]) == 0
    assert "sequences" not in capsys.readouterr().out


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert f"RUN = {tmp_path}: " in refusal(capsys, tmp_path)


def test_the_number_of_tokens_must_be_at_least_one(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["tokens", "run", "--top", "0"])
    assert "'0' is not a whole number from 1 on" in capsys.readouterr().err


def test_the_command_never_imports_torch(run: RunDir):
    program = """
import sys
from headrace.cli.main import main
assert main(["tokens", sys.argv[1]]) == 0
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program, run.root], check=True, capture_output=True)
