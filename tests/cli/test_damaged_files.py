"""Commands on runs whose small files are damaged, deleted or edited: an error or a notice that names the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.inference.model_shape import check_weights
from headrace.observe.metrics import read_metrics
from headrace.rollout.schema import DamagedFile
from headrace.text.hub import model_directory
from headrace.text.tokenizer import Tokenizer
from tests.end_to_end.test_recorded_runs import RECORDED, copy_recorded_runs

NEWEST = "checkpoints/step-00000004"
SMALL = ["summary", "compare", "resume", "push"]

Damage = Callable[[Path], object]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of runs that an earlier version wrote."""
    copy = copy_recorded_runs(tmp_path / "recorded")
    monkeypatch.chdir(copy)
    monkeypatch.syspath_prepend(str(copy))
    return copy


def write(name: str, content: bytes) -> Damage:
    return lambda run: (run / name).write_bytes(content)


def cut(name: str, size: int) -> Damage:
    """Truncate all files of a name, which may be a glob pattern."""
    return lambda run: [path.write_bytes(path.read_bytes()[:size]) for path in run.glob(name)]


def delete(name: str) -> Damage:
    return lambda run: shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


def command(here: Path, kind: str, name: str) -> list[str]:
    run = here / kind
    return {
        "summary": ["summary", str(run)],
        "compare": ["compare", str(run), str(here / "hackable")],
        "rescore": ["rescore", str(run), "--algo", "max_rl"],
        "tokens": ["tokens", str(run)],
        "export": ["export", str(run), str(here / "exported")],
        "resume": [
            "sft" if kind == "sft" else "rl",
            str(run / "config.toml"),
            *("--max_steps", "5", "--resume"),
            "--dry-run",
        ],
        "push": ["push", str(run), "team/run", "--dry-run"],
        "trainer": ["trainer", str(run), "--resume"],
    }[name]


def check(here: Path, kind: str, name: str, file: str, capsys: pytest.CaptureFixture[str], fails: bool | None) -> None:
    """Run a command; `fails`: whether it must, None if either is right. What it says must name the file."""
    code = main(command(here, kind, name))
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert code in ((0, 1, 2) if fails is None else (1, 2) if fails else (0,)), said
    if code:
        assert file in said


LINES = {
    "binary": b"\x00\xff\xfe garbage",
    "half a record": b'{"step": 5, "lo',
    "an array": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "nothing": b"",
    "an empty record": b"{}",
    "no step": b'{"time": 1.0, "loss": 1}',
    "no time": b'{"step": 1, "loss": 1}',
    "a step that is text": b'{"step": "4", "time": 1.0, "loss": 1}',
    "a step that is no whole number": b'{"step": 1.5, "time": 1.0, "loss": 1}',
    "a negative step": b'{"step": -4, "time": 1.0, "loss": 1}',
    "a time that is text": b'{"step": 1, "time": "noon", "loss": 1}',
    "a loss that is a table": b'{"step": 4, "time": 1.0, "loss": {"a": 1}}',
    "NaN": b'{"step": 4, "time": 1.0, "loss": NaN}',
    "infinity": b'{"step": 4, "time": 1.0, "loss": 1e999}',
    "a key that is not UTF-8": b'{"step": 4, "time": 1.0, "\xff": 1}',
    "deep nesting": b"[" * 100_000,
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_odd_lines_of_the_metrics_are_skipped_and_counted(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "time": 1.0, "loss": null, "process": "trainer"}\n'
    file.write_bytes(line + b"\n" + good + line + b"\n" + good + line)
    assert [record["step"] for record in read_metrics(file)] == [1, 1]
    assert "2 of 4 lines" in caplog.text and str(file) in caplog.text


ODD = b"".join(line + b"\n" for line in LINES.values())
NULLS = b'{"step": 4, "time": 1.0, "progress/rollouts": 1, "loss": null, "progress/seconds": null, "time/step": null, '
NULLS += b'"eval/letters/avg@1": null, "eval/letters/errors": null, "perf/slots_used": null, "reward/all/mean": null}\n'


TEXTS = NULLS.replace(b"null", b'"low"')


def add(content: bytes) -> Damage:
    def damage(run: Path) -> None:
        file = run / "metrics.jsonl"
        file.write_bytes(content + file.read_bytes() + content)

    return damage


def repeat(run: Path) -> None:
    file = run / "metrics.jsonl"
    file.write_bytes(2 * file.read_bytes())


DAMAGES: dict[str, tuple[Damage, str, list[str], bool | None]] = {
    "odd lines of the metrics": (add(ODD), "metrics.jsonl", SMALL, False),
    "metrics that are null": (add(NULLS), "metrics.jsonl", SMALL, False),
    "metrics that are text": (add(TEXTS), "metrics.jsonl", SMALL, False),
    "repeated metrics": (repeat, "metrics.jsonl", SMALL, False),
    "empty metrics": (write("metrics.jsonl", b""), "reward/all/mean", SMALL, None),
    "metrics of zeros": (write("metrics.jsonl", bytes(4096)), "reward/all/mean", SMALL, None),
    "no metrics": (delete("metrics.jsonl"), "metrics.jsonl", SMALL, None),
    "a configuration that was cut": (
        write("config.toml", b'output_dir = "ru'), "config.toml", [*SMALL, "rescore", "tokens"], True,
    ),
    "a binary configuration": (write("config.toml", b"\x00\xff"), "config.toml", [*SMALL, "rescore", "tokens"], True),
    "a configuration of other types": (write("config.toml", b"orchestrator = 3"), "config.toml", SMALL, None),
    "an environment without a name": (
        write("config.toml", b"[[orchestrator.train.env]]\nid = 3\n"), "config.toml", SMALL, None,
    ),
    "an empty configuration": (write("config.toml", b""), "config.toml", [*SMALL, "rescore", "tokens"], None),
    "no configuration": (delete("config.toml"), "config.toml", [*SMALL, "rescore", "tokens"], None),
    "a heartbeat that was cut": (write("heartbeat.json", b'{"sta'), "heartbeat.json", SMALL, False),
    "a heartbeat of other types": (write("heartbeat.json", b"[1]"), "heartbeat.json", SMALL, False),
    "folders of code of other types": (
        write("code_folders.json", b'{"a": 1}'), "code_folders.json", ["summary", "resume", "rescore"], None,
    ),
    "rollouts that were cut": (cut("rollouts/*.parquet", 100), ".parquet", ["summary", "compare", "rescore"], None),
    "empty rollouts": (cut("rollouts/*.parquet", 0), ".parquet", ["summary", "compare", "rescore"], None),
    "no rollouts": (delete("rollouts"), "rollouts", ["summary", "compare", "rescore"], None),
    "a file with another's name": (
        write("rollouts/step-x.parquet", b"x"), "step-x", ["summary", "compare", "rescore"], False,
    ),
    "tokens that were cut": (cut("tokens/*/*.parquet", 100), "tokens", ["tokens"], True),
    "no tokens": (delete("tokens"), "tokens", ["tokens"], True),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_of_a_run_is_named_by_each_command(here: Path, name: str, capsys: pytest.CaptureFixture[str]):
    damage, file, commands, fails = DAMAGES[name]
    damage(here / "rl")
    for each in commands:
        check(here, "rl", each, file, capsys, fails)


def other_checkpoint(run: Path) -> None:
    (run / "checkpoints" / "step-x").mkdir()
    (run / "checkpoints" / "step-x" / "COMPLETE.json").write_bytes(b"{}")


CHECKPOINTS: dict[str, tuple[Damage, str, bool]] = {
    "no state": (delete(f"{NEWEST}/state.json"), "state.json", True),
    "an empty state": (write(f"{NEWEST}/state.json", b""), "state.json", True),
    "a state of other types": (write(f"{NEWEST}/state.json", b'{"step": "x", "schema": 1}'), "state.json", True),
    "no tensors": (delete(f"{NEWEST}/tensors"), "tensors", True),
    "no tensor files": (lambda run: [f.unlink() for f in (run / NEWEST / "tensors").iterdir()], "tensors", True),
    "empty tensor files": (cut(f"{NEWEST}/tensors/*", 0), ".safetensors", True),
    "tensor files that were cut": (cut(f"{NEWEST}/tensors/*", 1000), ".safetensors", True),
    "no model files": (delete(f"{NEWEST}/model"), "model", True),
    "an empty model configuration": (write(f"{NEWEST}/model/config.json", b""), "config.json", True),
    "an empty marker": (write(f"{NEWEST}/COMPLETE.json", b""), "COMPLETE.json", True),
    "another's directory": (other_checkpoint, "step-x", False),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_checkpoint_is_not_exported(here: Path, name: str, capsys: pytest.CaptureFixture[str]):
    damage, file, fails = CHECKPOINTS[name]
    damage(here / "rl")
    check(here, "rl", "export", file, capsys, fails)
    assert (here / "exported").exists() != fails


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_resumed_trainer_names_what_is_damaged_and_leaves_an_older_checkpoint_to_continue_from(
    here: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    damage, file, fails = CHECKPOINTS[name]
    run = here / "sft"
    damage(run)
    code = main(command(here, "sft", "trainer"))
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if not fails:
        assert code == 0
        return
    assert code not in (0, 1) and file in said  # 1 would be an unexplained failure
    older = run / "checkpoints" / "step-00000002"
    assert older.is_dir() and not (run / NEWEST).exists()
    assert main(command(here, "sft", "trainer")) == 0, capsys.readouterr().err


MODEL_FILES: dict[str, tuple[Damage, str]] = {
    "empty settings": (write("config.json", b""), "config.json"),
    "settings of other types": (write("config.json", b"[]"), "config.json"),
    "tokenizer settings of other types": (write("tokenizer_config.json", b"[]"), "tokenizer_config.json"),
    "weights that were cut": (cut("model.safetensors", 20_000), "model.safetensors"),
    "empty weights": (cut("model.safetensors", 0), "model.safetensors"),
    "weights that are text": (write("model.safetensors", b"version https://git-lfs"), "model.safetensors"),
}


def read_model(name: str) -> None:
    directory = model_directory(name)
    Tokenizer(directory)
    check_weights(directory)


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_damaged_model_is_refused_by_the_name_of_its_file(tmp_path: Path, name: str):
    damage, file = MODEL_FILES[name]
    shutil.copytree(RECORDED / "micro", tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(DamagedFile) as error:
        read_model(str(tmp_path / "model"))
    assert error.value.file == tmp_path / "model" / file
