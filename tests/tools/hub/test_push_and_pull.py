"""What goes up comes down as it was, once, and nothing else goes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
import tomli_w

from headrace.cli.main import main
from headrace.launch.run_directory import checkpoints
from headrace.launch.saved_config import read_run
from headrace.observe.summary import summarize
from headrace.rollout.digest import seal
from headrace.rollout.types import Rollout
from headrace.tools.hub.card import run_card
from headrace.tools.hub.repository import Checksum, git_hash_of
from headrace.transport.checkpoint_files import CheckpointMarker
from headrace.transport.digests import file_digest, write_digests
from headrace.transport.platform import Platform
from headrace.transport.rollout_files import write_eval_rollouts, write_rollouts
from headrace.transport.run_dir import RunDir
from tests.observe.runs import write_run
from tests.tools.hub.conftest import KEY, write_checkpoint, write_model
from tests.tools.hub.stand_in import LARGE, Hub

REPO = "models/team/mill"


def headrace(*words: object) -> int:
    return main([str(word) for word in words])


def test_a_run_comes_back_with_its_model_settings_and_metrics(hub: Hub, run: Path, tmp_path: Path):
    assert headrace("push", run, "team/mill") == 0
    assert headrace("pull", "team/mill", tmp_path / "elsewhere") == 0
    elsewhere = RunDir(tmp_path / "elsewhere")
    assert summarize(elsewhere).reward_end == summarize(RunDir(run)).reward_end
    assert (elsewhere.final_model / "model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()
    assert elsewhere.metrics.read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert elsewhere.summary.is_file()
    assert read_run(elsewhere.root).output_dir == elsewhere.root
    assert not checkpoints(elsewhere.root)
    assert not list(tmp_path.glob(".elsewhere*"))


def test_the_model_of_a_run_is_where_everybody_looks_for_one(hub: Hub, run: Path):
    headrace("push", run, "team/mill")
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= hub.files(REPO)
    assert hub.repos[REPO].private


def test_only_what_is_known_to_be_harmless_leaves_the_machine(hub: Hub, run: Path):
    headrace("push", run, "team/mill", "--permanent", "--resume-state")
    allowed = {"README.md", "headrace.json", ".gitattributes", "config.json", "model.safetensors", "tokenizer.json"}
    others = {path for path in hub.files(REPO) - allowed if not path.startswith("run/")}
    assert others == set()
    contents = [path.read_bytes() for path in hub.folder.iterdir()]
    assert contents and not any(KEY.encode() in content for content in contents)
    assert not any(str(run.parent).encode() in content for content in contents)  # nor paths of the machine


def test_the_same_again_uploads_nothing(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]):
    headrace("push", run, "team/mill", "--permanent")
    uploaded, commit = list(hub.uploaded), hub.repos[REPO].branches["main"]
    hub.calls.clear()
    assert headrace("push", run, "team/mill", "--permanent") == 0
    assert "0 files to upload, 0 B; 11 there already" in capsys.readouterr().out
    assert hub.uploaded == uploaded
    assert hub.repos[REPO].branches["main"] == commit
    assert not [call for call in hub.calls if call.startswith(("POST", "PUT"))]


def test_a_changed_file_goes_up_alone_and_one_that_is_gone_goes_away(hub: Hub, run: Path):
    headrace("push", run, "team/mill", "--permanent")
    hub.uploaded.clear()
    (run / "model/tokenizer.json").rename(run / "model/vocabulary.json")
    assert headrace("push", run, "team/mill") == 0
    assert set(hub.uploaded) == {"headrace.json", "vocabulary.json"}
    assert "tokenizer.json" not in hub.files(REPO)
    assert "run/checkpoints/permanent/step-00000002/COMPLETE.json" in hub.files(REPO)  # not of this push: it stays


def test_a_run_can_be_continued_elsewhere(hub: Hub, run: Path, tmp_path: Path):
    with closing(sqlite3.connect(run / "journal.sqlite")) as database:
        database.execute("CREATE TABLE probe (x)")
    (run / "reference").mkdir()
    (run / "reference/logprobs.safetensors").write_bytes(b"of a start model")
    assert headrace("push", run, "team/mill", "--resume-state") == 0
    assert headrace("pull", "team/mill", tmp_path / "elsewhere") == 0
    elsewhere = tmp_path / "elsewhere"
    assert list(checkpoints(elsewhere)) == [4]
    assert (elsewhere / "batches/step-00000005.safetensors").is_file()
    assert (elsewhere / "reference/logprobs.safetensors").read_bytes() == b"of a start model"
    assert headrace("push", run, "team/mill") == 0
    assert "run/batches/step-00000005.safetensors" in hub.files(REPO)  # a push that does not name them leaves them
    with closing(sqlite3.connect(elsewhere / "journal.sqlite")) as database:
        assert database.execute("SELECT count(*) FROM probe").fetchone() == (0,)
    tree = tomllib.loads((elsewhere / "config.toml").read_text())
    for section in (tree, tree["trainer"], tree["orchestrator"], tree["inference"]):
        assert section["output_dir"] == str(elsewhere)
        assert section["model"]["name"] == str(elsewhere / "base")
    assert (elsewhere / "base/model.safetensors").read_bytes() == (
        tmp_path / "models/the-base/model.safetensors"
    ).read_bytes()


def test_checkpoints_come_along_when_they_are_named(hub: Hub, run: Path, tmp_path: Path):
    assert headrace("push", run, "team/mill", "--checkpoint", "step-4", "--permanent") == 0
    assert headrace("pull", "team/mill", tmp_path / "elsewhere") == 0
    found = checkpoints(tmp_path / "elsewhere")
    assert {step: path.parent.name for step, path in found.items()} == {2: "permanent", 4: "checkpoints"}


@pytest.mark.parametrize("folder", ["model", "checkpoints/step-00000004"])
def test_a_damaged_model_or_checkpoint_is_not_uploaded(
    folder: str, hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
):
    path = run / folder / ("config.json" if folder == "model" else "state.json")
    if folder == "model":
        write_digests(path.parent)
    else:
        marker = CheckpointMarker(4, files={path.name: file_digest(path)})
        (path.parent / "COMPLETE.json").write_bytes(seal(marker))
    assert headrace("push", run, "team/mill", "--checkpoint", "step-4") == 0
    path.write_text("{ }")
    assert headrace("push", run, "team/mill", "--checkpoint", "step-4") == 2
    assert str(path) in capsys.readouterr().err


def test_a_pull_fetches_only_what_is_not_there(hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    headrace("push", run, "team/mill")
    headrace("pull", "team/mill", tmp_path / "elsewhere")
    (tmp_path / "elsewhere/model/tokenizer.json").unlink()
    hub.calls.clear()
    capsys.readouterr()
    assert headrace("pull", "team/mill", tmp_path / "elsewhere") == 0
    assert "1 file to download, 2 B; 3 here already" in capsys.readouterr().out
    assert not [call for call in hub.calls if call.endswith("model.safetensors")]


def test_a_pull_does_not_write_over_what_differs_unless_it_may(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    headrace("push", run, "team/mill")
    mine = tmp_path / "elsewhere/model/tokenizer.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert headrace("pull", "team/mill", tmp_path / "elsewhere") == 2
    assert f"{mine}: " in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()] == ["tokenizer.json"]
    assert headrace("pull", "team/mill", tmp_path / "elsewhere", "--overwrite") == 0
    assert mine.read_text() == "{}"


def test_a_download_that_breaks_off_is_continued(hub: Hub, run: Path, tmp_path: Path):
    headrace("push", run, "team/mill")
    hub.cut_after = 1000
    assert headrace("pull", "team/mill", tmp_path / "elsewhere") == 0
    copied = tmp_path / "elsewhere/model/model.safetensors"
    assert copied.read_bytes() == (run / "model/model.safetensors").read_bytes()


def test_a_dry_run_lists_what_would_go_up_and_sends_nothing(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert headrace("push", run, "team/mill", "--dry-run") == 0
    size = (run / "model/model.safetensors").stat().st_size
    assert f"{size / 1000:.1f} kB  model.safetensors" in capsys.readouterr().out
    assert hub.repos == {}
    monkeypatch.delenv("HF_TOKEN")
    hub.calls.clear()
    assert headrace("push", run, "team/mill", "--dry-run") == 0
    assert "HF_TOKEN is not set: the hub was not asked" in capsys.readouterr().out
    assert hub.calls == []


def test_a_branch_is_made_and_pulled_from(hub: Hub, run: Path, tmp_path: Path):
    assert headrace("push", run, "team/mill", "--revision", "try-2") == 0
    assert hub.files(REPO) == {".gitattributes"}
    assert headrace("pull", "team/mill", tmp_path / "elsewhere", "--revision", "try-2") == 0
    assert (tmp_path / "elsewhere/metrics.jsonl").is_file()


def test_a_model_is_pushed_by_itself(hub: Hub, tmp_path: Path):
    model = write_model(tmp_path / "small")
    assert headrace("push", model, "team/small", "--no-private") == 0
    assert not hub.repos["models/team/small"].private
    assert headrace("pull", "team/small", tmp_path / "copy") == 0
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_data_is_pushed_by_file_and_by_folder(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "sums"
    (folder / "test").mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (folder / "test" / "large.jsonl").write_text("x" * (LARGE + 1))
    (folder / ".env").write_text(KEY)
    assert headrace("push", folder, "team/sums", "--dataset") == 0
    assert "left out: .env (hidden" in capsys.readouterr().out
    assert headrace("pull", "team/sums", tmp_path / "copy", "--dataset") == 0
    assert (tmp_path / "copy/test/large.jsonl").read_text() == "x" * (LARGE + 1)
    one = tmp_path / "more.jsonl"
    one.write_text("{}\n")
    assert headrace("push", one, "team/sums", "--dataset") == 0  # added to those that are there
    data = {"train.jsonl", "test/large.jsonl", "more.jsonl"}
    assert data <= hub.files("datasets/team/sums")
    assert set(json.loads(hub.content("datasets/team/sums", "headrace.json"))["files"]) == data


@pytest.fixture
def sweep(run: Path, tmp_path: Path) -> Path:
    """A sweep of two runs, with its record, report, evaluation and logs, and all that must not travel."""
    folder = tmp_path / "artifacts" / "lambda"
    folder.mkdir(parents=True)
    for name in ("lr=0.0001,seed=0", "lr=0.001,seed=0"):
        shutil.copytree(run, folder / name)
        (folder / name / "logs" / "inference.log").write_text("up")
        (folder / name / "journal.sqlite-shm").write_bytes(bytes(64))
        (folder / name / "turns").mkdir()
        (folder / name / "turns" / "engine.lock").touch()
    files = {
        "sweep.json": "{}", "report.md": "# Report", "report.html": "<html/>", "curves/reward.svg": "<svg/>",
        "eval/results.csv": "a,b", "eval/model/completions.jsonl": "{}\n", "notes/run.yaml": "a: 1",
        "notes/rl.toml": "a = 1",
        "notes/thoughts.py": "x = 1", "weights.bin": "\0\1", "LICENSE": "free", "empty.txt": "",
        "logs/one.log": "x" * LARGE,
    }  # fmt: skip
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / ".lock").touch()
    (folder / "unused").mkdir()
    (folder / "latest").symlink_to(folder / "notes", target_is_directory=True)
    (folder / "outside.json").symlink_to(tmp_path / "models" / "the-base" / "config.json")
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sweep_comes_back_whole_but_for_secrets_and_what_is_of_one_machine(
    hub: Hub, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = files_in(sweep)
    assert headrace("push", sweep, "team/lambda") == 0
    left_out = set(re.findall(r"^left out: (.+) \(.+\)$", capsys.readouterr().out, re.MULTILINE))
    inner = ("endpoints", "driver.json", "turns", ".env", "journal.sqlite-shm", "model/key.pem")
    own = {f"{name}/{path}" for name in ("lr=0.0001,seed=0", "lr=0.001,seed=0") for path in inner}
    assert left_out == own | {".lock", "unused", "latest", "outside.json"}
    assert headrace("pull", "team/lambda", tmp_path / "copy", "--dataset") == 0
    stays = tuple(path if (sweep / path).is_file() else f"{path}/" for path in left_out)
    assert files_in(tmp_path / "copy") == {path: text for path, text in before.items() if not path.startswith(stays)}
    assert not any(KEY.encode() in path.read_bytes() for path in hub.folder.iterdir())
    assert read_run(tmp_path / "copy" / "lr=0.001,seed=0").output_dir == tmp_path / "copy" / "lr=0.001,seed=0"


def test_the_same_snapshot_again_sends_nothing_and_what_is_gone_goes_away(hub: Hub, sweep: Path):
    headrace("push", sweep, "team/lambda")
    hub.uploaded.clear()
    assert headrace("push", sweep, "team/lambda") == 0
    assert hub.uploaded == []
    (sweep / "report.md").unlink()
    assert headrace("push", sweep, "team/lambda", "--exclude", "*.html", "--exclude", "*/checkpoints/*") == 0
    files = hub.files("datasets/team/lambda")
    assert not {path for path in files if path.endswith(("report.md", ".html")) or "/checkpoints/" in path}
    assert "lr=0.001,seed=0/model/model.safetensors" in files


def test_a_file_of_a_snapshot_that_arrives_changed_is_not_taken(hub: Hub, sweep: Path, tmp_path: Path):
    headrace("push", sweep, "team/lambda")
    (blob,) = [path for path in hub.folder.iterdir() if path.read_bytes() == (sweep / "logs/one.log").read_bytes()]
    blob.write_bytes(b"y" * LARGE)
    assert headrace("pull", "team/lambda", tmp_path / "copy", "--dataset") == 1
    assert not (tmp_path / "copy").exists()


def test_the_readme_of_a_folder_is_its_card_and_comes_back(hub: Hub, tmp_path: Path):
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "README.md").write_text("# Mine")
    assert headrace("push", tmp_path / "sums", "team/sums", "--dataset") == 0
    assert hub.content("datasets/team/sums", "README.md") == b"# Mine"
    assert headrace("pull", "team/sums", tmp_path / "copy", "--dataset") == 0
    assert files_in(tmp_path / "copy") == {"README.md": b"# Mine"}


def test_the_storage_root_of_this_machine_stays_here(hub: Hub, run: Path, tmp_path: Path):
    tree = tomllib.loads((run / "config.toml").read_text())
    tree["launch"] = {"env": {"HEADRACE_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "MINE": "1"}}
    tree["wandb"] = {"dir": str(tmp_path / "logs")}
    (run / "config.toml").write_text(tomli_w.dumps(tree))
    headrace("push", run, "team/mill")
    assert str(tmp_path).encode() not in hub.content(REPO, "run/config.toml")
    headrace("pull", "team/mill", tmp_path / "elsewhere")
    assert read_run(tmp_path / "elsewhere").launch.env == {"MINE": "1"}


def test_rollouts_of_a_run_are_a_dataset(hub: Hub, run: Path, tmp_path: Path):
    write_rollouts(run / "rollouts", 1, [Rollout()], [])
    write_eval_rollouts(run / "rollouts" / "eval-step-00000001.parquet", 1, [Rollout()])
    assert headrace("push", run, "team/rollouts", "--rollouts") == 0
    files = hub.files("datasets/team/rollouts")
    assert {"data/step-00000001.parquet", "data/eval-step-00000001.parquet"} <= set(files)


def test_the_card_tells_what_is_known(hub: Hub, run: Path):
    headrace("push", run, "team/mill")
    card = hub.content(REPO, "README.md").decode()
    assert "A run of reinforcement learning with Headrace" in card
    assert "It began with a local model, `the-base`." in card
    assert "| train reward | 0.150 → 0.700 (+0.550) |" in card  # the first and the last two of five steps
    assert "| training | reverse-text |" in card
    assert "| orchestrator.algo.type | grpo |" in card
    assert "headrace pull team/mill mill" in card


def test_the_card_names_data_scores_and_versions_without_the_machines_folders(tmp_path: Path):
    keys = {
        "orchestrator.train.env": [{"id": "gsm8k", "args": {"path": str(tmp_path / "gsm.jsonl"), "limit": 9}}],
        "orchestrator.eval.env": [{"id": "reverse-text", "num_examples": 5}],
    }
    run = RunDir(write_run(tmp_path / "mill", [0.1, 0.5], {0: 0.25, 2: 0.75}, keys=keys))
    versions = {"torch": "2.13.0"}
    platform = Platform(versions, "x86_64", "NVIDIA H200", "bfloat16", threads=4, ranks=2)
    run.platform.write_bytes(seal(platform))
    card = run_card(run, "team/mill", "team/base", "base", [])
    assert "base_model: team/base" in card
    assert "| training | gsm8k | path = gsm.jsonl, limit = 9 |" in card
    assert "| evaluation | reverse-text | num_examples = 5 |" in card
    assert "0.250 → 0.750" in card
    assert "torch 2.13.0, on NVIDIA H200 (x86_64), bfloat16, 2 ranks" in card
    assert str(tmp_path) not in card


def test_a_card_of_supervised_training_names_its_dataset(tmp_path: Path):
    run = RunDir(tmp_path)
    data = {"name": "team/conversations", "split": "train", "batch_size": 8}
    run.config.write_text(tomli_w.dumps({"data": data, "validation": {"fraction": 0.1}, "max_steps": 3}))
    card = run_card(run, "team/mill", None, "base", [])
    assert "datasets:\n- team/conversations\n" in card
    assert "| training | team/conversations | split = train |" in card
    assert "| data.batch_size | 8 |" in card


def test_a_card_that_somebody_edited_stays(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]):
    headrace("push", run, "team/mill")
    repo = hub.repos[REPO]
    tree = dict(repo.commits[repo.branches["main"]])
    tree["README.md"] = hub.put_blob(b"# Mine", is_lfs=False)
    repo.add("main", tree)
    (run / "model/tokenizer.json").write_text('{"other": 1}')
    assert headrace("push", run, "team/mill") == 0
    assert "README.md was edited on the hub" in capsys.readouterr().out
    assert hub.content(REPO, "README.md") == b"# Mine"


def test_a_file_of_a_run_outside_of_its_places_is_not_restored(hub: Hub, run: Path, tmp_path: Path):
    """Somebody may have put it there to be imported, or to be run."""
    headrace("push", run, "team/mill")
    repo = hub.repos[REPO]
    tree = dict(repo.commits[repo.branches["main"]])
    manifest = json.loads(hub.content(REPO, "headrace.json"))
    manifest["files"] += ["run/code_folders.json", "run/endpoints/inference.json"]
    for path in ("run/code_folders.json", "run/endpoints/inference.json"):
        tree[path] = hub.put_blob(b"[]", is_lfs=False)
    tree["headrace.json"] = hub.put_blob(json.dumps(manifest).encode(), is_lfs=False)
    repo.add("main", tree)
    assert headrace("pull", "team/mill", tmp_path / "elsewhere") == 0
    names = {path.name for path in (tmp_path / "elsewhere").iterdir()}
    assert names == {"config.toml", "metrics.jsonl", "model", "reward.svg", "summary.md"}


def test_checksums_are_those_of_git_and_of_lfs(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"what is up, doc?")
    for content in (tmp_path / "file", b"what is up, doc?"):
        assert git_hash_of(content) == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"  # Pro Git, "Git Objects"
        assert Checksum(16, "bd9dbf5aae1a3862dd1526723246b20206e5fc37", None).fits(content)
        assert Checksum(16, "", hashlib.sha256(b"what is up, doc?").hexdigest()).fits(content)
        assert not Checksum(16, "", hashlib.sha256(b"what is up, Doc?").hexdigest()).fits(content)


def test_the_command_itself_pushes_with_variables_alone(hub: Hub, tmp_path: Path):
    """As a user runs it, in a process of its own."""
    model = write_model(tmp_path / "small")
    environment = {"HF_ENDPOINT": hub.url, "OTHER_TOKEN": "hf_stands_for_one_that_writes", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "push", str(model), "team/small", "--token-var", "OTHER_TOKEN"],
        env={**environment, "HF_HOME": str(tmp_path / "home"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in hub.files("models/team/small")


@pytest.mark.parametrize("step", [2, 4])
def test_a_step_that_is_no_checkpoint_is_named(hub: Hub, run: Path, step: int, capsys: pytest.CaptureFixture[str]):
    write_checkpoint(run / "checkpoints", 6)
    assert headrace("push", run, "team/mill", "--checkpoint", f"step-{step + 1}") == 2
    assert f'--checkpoint = "step-{step + 1}": ' in capsys.readouterr().err
