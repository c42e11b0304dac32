"""examples/math: a run of long answers with an evaluation of four answers to a problem, checked without the hub."""

from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.environments.registry import load_environment
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.trainer.tiny import write_tiny_model

REPOSITORY = Path(__file__).parents[2]
FILE = REPOSITORY / "examples" / "math" / "rl.toml"
DATA = REPOSITORY / "tests" / "data"


def test_the_example_passes_a_dry_run_with_local_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_tiny_model(tmp_path / "model")
    entries = (("train", DATA / "math"), ("eval", DATA / "math500"))
    sources = [f"--orchestrator.{slot}.env.0.args.source={source}" for slot, source in entries]
    options = [f"--model.name={tmp_path / 'model'}", f"--output_dir={tmp_path / 'run'}", *sources]
    code = main(["rl", str(FILE), *options, "--orchestrator.train.env.0.args.split=test", "--dry-run"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "group_size = 4" in out
    assert not (tmp_path / "run").exists()


def test_four_answers_are_sampled_to_every_problem_of_math_500():
    config = load(RunConfig, [FILE])[0].orchestrator
    (env,) = config.eval.env
    assert (config.eval.num_examples, config.eval.group_size, env.group_size) == (500, 4, None)
    assert env.args["source"] == "HuggingFaceH4/MATH-500"
    longest = config.train.sampling.max_tokens
    assert config.seq_len is not None and longest is not None and config.seq_len > longest


@pytest.mark.parametrize(("slot", "data"), [("train", "math"), ("eval", "math500")])
def test_its_environments_take_their_arguments(slot: str, data: str):
    (env,) = getattr(load(RunConfig, [FILE])[0].orchestrator, slot).env
    tasks = load_environment(env.id, {**env.args, "source": str(DATA / data), "split": "test"}).tasks()
    assert {task["level"] for task in tasks} == ({3, 4, 5} if slot == "train" else {1, 2, 3, 4, 5})
