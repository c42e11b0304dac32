"""The command line: what it prints, what it refuses and with which exit code, before any process is started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.cli.common import separate_overrides
from headrace.cli.main import main, parse, run_command
from headrace.cli.serve import read_target
from headrace.config.sft import SftConfig
from headrace.errors import BadInput
from headrace.launch import resources
from headrace.launch.resource_plan import Machine
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.trainer.tiny import write_tiny_settings
from tests.cli.run_files import RUN_FILE

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse-text"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What the launcher checks of a model: all but its weights."""
    directory = tmp_path / "model"
    write_tiny_settings(directory)
    return directory


@pytest.fixture
def run_file(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "rl.toml"
    path.write_text(RUN_FILE.format(output=tmp_path / "out", model=model))
    return path


def refuse(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str]:
    """Exit code and the message, which is never a traceback."""
    code = main([str(word) for word in argv])
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return code, err


COUNT_MODULES = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from headrace.cli.main import main
main(sys.argv[1:])
"""
HEAVY = {"torch", "transformers", "pyarrow", "pandas", "openai", "aiohttp", "datasets"}


@pytest.mark.parametrize(
    ("command", "most", "unused"),
    [
        (["--help"], 120, {"numpy", "pydantic", "rich", "msgspec", "asyncio", "httpx"}),
        (["--version"], 200, {"numpy", "pydantic", "rich", "msgspec", "asyncio", "httpx"}),
        (["rl", str(EXAMPLE / "rl.toml"), "--dry-run"], 760, {"rich", "click", "headrace.launch.supervisor"}),
    ],
    ids=["help", "version", "dry run"],
)
def test_a_command_imports_few_modules(command: list[str], most: int, unused: set[str]) -> None:
    """Holds the time to start. The bounds are the counts on Python 3.11 and a few more; raise one only for a reason."""
    done = subprocess.run([sys.executable, "-c", COUNT_MODULES, *command], capture_output=True, text=True, check=True)
    modules = json.loads(done.stderr.splitlines()[-1])
    assert not (HEAVY | unused) & set(modules)
    assert len(modules) <= most


def test_python_m_headrace_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", "--help"], capture_output=True, text=True, check=True)
    for command in ("rl", "sft", "serve", "orchestrator", "trainer", "summary", "init-model"):
        assert f"\n    {command} " in done.stdout or f"\n    {command}\n" in done.stdout


@pytest.mark.parametrize(("command", "kind"), [("rl", RunConfig), ("sft", SftConfig)])
def test_the_override_that_help_shows_is_one(command: str, kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([command, "--help"])
    override = capsys.readouterr().out.split("for example")[1].split()
    load(kind, [EXAMPLE / f"{command}.toml"], override)


def test_a_reader_that_has_seen_enough_ends_a_command_quietly() -> None:
    command = [sys.executable, "-m", "headrace", "config", "--explain", "trainer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("line", "own", "overrides"),
    [
        ("rl a.toml --trainer.optim.lr 1e-5 b.toml", "rl a.toml b.toml", "--trainer.optim.lr 1e-5"),
        ("rl --max_steps=3 a.toml", "rl a.toml", "--max_steps=3"),
        ("rl --resume a.toml", "rl --resume=latest a.toml", ""),
        ("rl a.toml --resume", "rl a.toml --resume=latest", ""),
        ("rl a.toml --resume 50 --seed -1", "rl a.toml --resume=50", "--seed -1"),
        ("rl a.toml --resume out/checkpoints/step-00000050", "rl a.toml --resume=out/checkpoints/step-00000050", ""),
        ("rl a.toml --dry-run --clean --x.flag", "rl a.toml --dry-run --clean", "--x.flag"),
    ],
)
def test_overrides_may_stand_anywhere_between_files(line: str, own: str, overrides: str) -> None:
    assert separate_overrides(line.split()) == (own.split(), overrides.split())


def test_resume_and_clean_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["rl", "a.toml", "--resume", "--clean"])
    assert ended.value.code == 2


def test_a_copied_run_does_not_go_on_where_it_was_copied_from(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    for directory in (original, copy):
        directory.mkdir()
        (directory / "config.toml").write_text(RUN_FILE.format(output=original, model=model))
    code, message = refuse(capsys, "rl", copy / "config.toml", "--resume")
    assert code == 2
    assert f'{copy / "config.toml"}: output_dir = "{original}": ' in message


def test_dry_run_prints_what_loads_to_the_same_and_touches_nothing(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tmp_path / "more.toml"
    more.write_text("[orchestrator]\ngroup_size = 4\n[orchestrator.buffer]\nsize = 9\n")
    assert main(["rl", str(run_file), str(more), "--trainer.optim.lr", "1e-5", "--dry-run"]) == 0
    printed = capsys.readouterr()
    tree = tomllib.loads(printed.out)
    assert (tree["orchestrator"]["group_size"], tree["trainer"]["optim"]["lr"]) == (4, 1e-5)
    assert "orchestrator.buffer is not a key of Headrace" in printed.err
    again = tmp_path / "again.toml"
    again.write_text(printed.out)
    assert main(["rl", str(again), "--dry-run"]) == 0
    assert without_comments(capsys.readouterr().out) == without_comments(printed.out)
    assert not (tmp_path / "out").exists()


def without_comments(page: str) -> str:
    """Return a run file without its comments, which say how much memory is free at the moment."""
    return "".join(line for line in page.splitlines(keepends=True) if not line.startswith("#"))


def test_a_run_that_cannot_fit_is_refused_before_it_starts_and_explained_by_a_dry_run(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "measure", lambda _: Machine(None, host_memory=1 << 20, free_disk=1 << 40))
    code, message = refuse(capsys, "rl", run_file)
    assert code == 2
    assert "host memory" in message
    assert not (tmp_path / "out").exists()
    assert main(["rl", str(run_file), "--dry-run"]) == 0
    assert "# not on this machine: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ("0", "# trainer and engine share one GPU, in turns (launch.sharing = alternate)"),
        ("0,1,2", "# 2 GPUs train and 1 sample"),
        ("", "# prompts of reverse-text: "),
    ],
)
def test_dry_run_says_what_depends_on_the_machine(
    run_file: Path, gpus: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert main(["rl", str(run_file), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(says)


def test_dry_run_of_what_this_machine_cannot_do_says_so_and_prints_it(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["rl", str(run_file), "--launch.trainer_processes", "6", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# not on this machine: launch.trainer_processes = 6: ")
    assert tomllib.loads(printed)["launch"]["trainer_processes"] == 6


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("--trainer.optim.lrr", "1", "--trainer.optim.lrr: unknown key. Did you mean trainer.optim.lr?"),
        ("--trainer.optim.lr", "-1", "--trainer.optim.lr = -1: must be greater than 0"),
        ("--max_steps", "0", "max_steps"),
        ("--model.name", "/no/such/model", "no such directory"),
    ],
)
def test_a_wrong_key_or_value_is_named(
    run_file: Path, argument: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = refuse(capsys, "rl", run_file, argument, value)
    assert code == 2
    assert err.startswith("headrace: ")
    assert words in err


@pytest.mark.parametrize("ranks", ["--ranks", "WORLD_SIZE"])
def test_several_ranks_share_no_device_with_servers(
    ranks: str, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    several = ["--ranks", "2"] if ranks == "--ranks" else []
    if not several:
        monkeypatch.setenv(ranks, "2")  # torchrun's way
    code, err = refuse(capsys, "trainer", run_file, *several, "--sharing", "alternate")
    assert code == 2
    assert '--sharing = "alternate": ' in err


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--nodes", "2"], "--rendezvous"),
        (["--nodes", "2", "--rendezvous", "10.0.0.1"], "--rendezvous"),
        (["--nodes", "2", "--rendezvous", "10.0.0.1:5000", "--node-rank", "2"], "--node-rank"),
    ],
)
def test_a_trainer_on_several_hosts_needs_an_address_and_its_place_among_them(
    capsys: pytest.CaptureFixture[str], run_file: str, options: list[str], key: str
):
    code, err = refuse(capsys, "trainer", run_file, *options)
    assert code == 2
    assert key in err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert refuse(capsys, "rl", "no-such.toml") == (2, "headrace: no-such.toml: no such file\n")


def test_a_model_directory_without_tokenizer_is_refused_before_anything_is_made(
    run_file: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "tokenizer.json").unlink()
    code, err = refuse(capsys, "rl", run_file)
    assert code == 2
    assert str(model / "tokenizer.json") in err
    assert not (tmp_path / "out").exists()


def test_an_existing_run_is_refused_with_both_ways_out(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.toml").write_text("")
    code, err = refuse(capsys, "rl", run_file)
    assert code == 2
    assert "--resume" in err
    assert "--clean" in err


@pytest.mark.parametrize(("step", "continued"), [("latest", "out"), ("5", "out-from-5")])
def test_a_run_and_a_fork_of_it_go_on_with_the_model_that_the_run_began_with(
    step: str,
    continued: str,
    run_file: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for saved in (5, 10):
        (tmp_path / "out" / "checkpoints" / f"step-{saved:08d}").mkdir(parents=True)
        (tmp_path / "out" / "checkpoints" / f"step-{saved:08d}" / "COMPLETE.json").write_text("{}")
    (tmp_path / "out" / "metrics.jsonl").write_text("")
    (tmp_path / "out" / "config.toml").write_text(run_file.read_text())
    run_file.write_text(run_file.read_text().replace(f'name = "{model}"', 'sft = "its-data-has-changed.toml"'))
    launched: list[RunConfig] = []
    monkeypatch.setattr("headrace.launch.run.launch", lambda config, *_, **__: launched.append(config) or 0)
    assert main(["rl", str(run_file), "--inference.port", "0", "--max_steps", "12", "--resume", step]) == 0
    assert [(config.output_dir, config.trainer.model.name) for config in launched] == [
        (tmp_path / continued, str(model))
    ]
    assert str(model) in capsys.readouterr().err


def test_clean_refuses_a_directory_that_is_no_run(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "photo.jpg").write_text("")
    code, err = refuse(capsys, "rl", run_file, "--clean")
    assert code == 2
    assert f"output_dir = {tmp_path / 'out'}: " in err
    assert (tmp_path / "out" / "photo.jpg").exists()


def test_a_port_in_use_is_named_before_anything_starts(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, err = refuse(capsys, "rl", run_file, "--inference.port", str(port))
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in err


def test_a_full_disk_names_the_run_directory(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    code, err = refuse(capsys, "rl", run_file)
    assert code == 1
    assert f"no space left on device (run directory: {tmp_path / 'out'})" in err


def test_sft_needs_an_output_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sft.toml"
    path.write_text('max_steps = 1\nseq_len = 64\n[model]\ninit = "tiny"\n[data]\nenv = "reverse-text"\n')
    code, err = refuse(capsys, "sft", path)
    assert code == 2
    assert "output_dir" in err


def test_serve_takes_a_model_or_a_run(run_file: Path, model: Path, tmp_path: Path) -> None:
    alone = read_target(str(model), [])
    assert (alone.port, alone.model.name, alone.output_dir) == (8000, str(model), None)
    assert read_target(str(model), ["--port", "0", "--max_running=7"]).max_running == 7
    run = tmp_path / "out"
    run.mkdir()
    (run / "config.toml").write_text(run_file.read_text())
    of_run = read_target(str(run), ["--port", "8123"])
    assert (of_run.port, of_run.output_dir) == (8123, run)
    assert of_run.max_model_len == load(RunConfig, [run_file])[0].seq_len


def test_an_orchestrator_of_an_sft_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f'output_dir = "{tmp_path}"\nmax_steps = 1\nseq_len = 8\n[model]\nname = "m"\n[data]\nenv = "reverse-text"\n'
    (tmp_path / "config.toml").write_text(text)
    code, err = refuse(capsys, "orchestrator", tmp_path)
    assert code == 2
    assert f"RUN = {tmp_path}: " in err


def test_init_model_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, err = refuse(capsys, "init-model", "tiny", tmp_path)
    assert code == 2
    assert "is not an empty directory" in err


def test_an_at_sign_before_a_run_file_is_accepted_with_a_notice(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["@", run_file], [f"@{run_file}"]):
        assert parse(["rl", *map(str, words), "--max_steps", "3"]).files == [run_file]
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "fix"),
    [("trian", "headrace train"), ("check_algorithm", "headrace check-algorithm"), ("rl.toml", "headrace rl rl.toml")],
)
def test_a_misspelt_command_suggests_the_right_one(word: str, fix: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse([word])
    assert (refused.value.key, refused.value.value) == ("COMMAND", word)
    assert fix in (refused.value.fix or "")


def test_a_run_file_of_the_other_command_is_refused_with_the_right_one(tmp_path: Path) -> None:
    for command, other in (("rl", "sft"), ("sft", "rl")):
        file = EXAMPLE / f"{other}.toml"
        with pytest.raises(BadInput) as refused:
            run_command(parse([command, str(file)]))
        assert refused.value.file == file
        assert f"headrace {other}" in (refused.value.fix or "")
