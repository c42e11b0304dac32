"""What cannot be done is said in a sentence, with what to do about it, and nothing has happened."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace.cli.main import main, parse, run_command
from headrace.errors import BadInput
from headrace.launch.run_directory import hold
from headrace.tools.hub.repository import HubFailure, Repository
from tests.observe.runs import write_run
from tests.tools.hub.conftest import write_model
from tests.tools.hub.stand_in import READER, WRITER, Hub


def refusal(*words: object) -> BadInput:
    """The error of the command."""
    arguments = parse([str(word) for word in words])
    with pytest.raises(BadInput) as error:
        run_command(arguments)
    return error.value


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    return code, capsys.readouterr().err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small")


def test_without_a_network(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    for words in (("push", model, "team/small"), ("pull", "team/small", "copy")):
        code, err = said(capsys, *words)
        assert code == 1
        assert err.startswith(f"headrace: the hub at {address} cannot be reached (")
        assert "check the network, and HF_ENDPOINT if it is set" in err
    assert not Path("copy").exists()


def test_without_a_token(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_TOKEN")
    assert refusal("push", model, "team/small").key == "HF_TOKEN"
    assert refusal("push", model, "team/small", "--token-var", "TEAM_TOKEN").key == "TEAM_TOKEN"
    assert hub.calls == []


@pytest.mark.parametrize("token", ["hf_expired_long_ago", READER])
def test_a_token_that_the_hub_does_not_take_or_that_may_not_write(
    hub: Hub, model: Path, token: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", token)
    error = refusal("push", model, "team/small")
    assert (error.key, error.value) == ("HF_TOKEN", None)
    code, err = said(capsys, "push", model, "team/small")
    assert (code, token in err) == (2, False)


def test_a_token_with_a_line_break(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_one\nhf_two")
    assert refusal("push", model, "team/small").key == "HF_TOKEN"


def test_a_repository_that_is_not_there_or_not_to_be_seen(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch):
    error = refusal("pull", "team/nothing", "copy")
    assert (error.key, error.value) == ("OWNER/NAME", "team/nothing")
    main(["push", str(model), "team/small"])
    monkeypatch.delenv("HF_TOKEN")
    assert refusal("pull", "team/small", "copy").value == "team/small"
    monkeypatch.setenv("HF_TOKEN", WRITER)
    assert refusal("pull", "team/small", "copy", "--revision", "gone").value == "team/small"


def test_a_repository_with_other_content(hub: Hub, model: Path, tmp_path: Path):
    main(["push", str(model), "team/small"])
    other = write_model(tmp_path / "other", seed=3)
    (other / "tokenizer.json").rename(other / "vocabulary.json")
    error = refusal("push", other, "team/small")
    assert (error.key, error.value) == ("OWNER/NAME", "team/small")
    assert main(["push", str(other), "team/small", "--replace"]) == 0
    files = {".gitattributes", "README.md", "headrace.json", "config.json", "model.safetensors", "vocabulary.json"}
    assert hub.files("models/team/small") == files


def lose(hub: Hub, name: str, file: str) -> None:
    """A commit by somebody else, in which a file is gone."""
    repo = hub.repos[name]
    repo.add("main", {path: content for path, content in repo.commits[repo.branches["main"]].items() if path != file})


def test_a_repository_that_somebody_filled_by_hand(hub: Hub, model: Path):
    main(["push", str(model), "team/small"])
    lose(hub, "models/team/small", "headrace.json")
    error = refusal("push", model, "team/small")
    assert (error.key, error.value) == ("OWNER/NAME", "team/small")
    assert "config.json, model.safetensors, tokenizer.json" in error.fact


def test_a_push_that_was_cut_off_is_found_out(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]):
    main(["push", str(model), "team/small"])
    lose(hub, "models/team/small", "model.safetensors")
    code, err = said(capsys, "pull", "team/small", "copy")
    assert (code, Path("copy").exists()) == (1, False)
    assert "team/small lacks model.safetensors: the push was cut off or undone; push it again" in err
    assert main(["push", str(model), "team/small"]) == 0
    assert main(["pull", "team/small", "copy"]) == 0


def test_offline_mode(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for words in (("push", model, "team/small"), ("pull", "team/small", "copy")):
        assert refusal(*words).key == "HF_HUB_OFFLINE"
    assert hub.calls == []


@pytest.mark.parametrize("repo", ["small", "team/a/b", "team/with space"])
def test_a_name_that_is_none(hub: Hub, model: Path, repo: str):
    error = refusal("push", model, repo)
    assert (error.key, error.value) == ("OWNER/NAME", repo)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["push", "folder", "team/x"], "PATH", "folder"),
        (["push", "folder", "team/x", "--dataset"], "PATH", "folder"),  # it is empty
        (["push", "gone", "team/x"], "PATH", "gone"),
        (["push", "folder", "team/x", "--permanent"], "--permanent", None),
        (["push", "folder", "team/x", "--checkpoint", "step-4"], "--checkpoint", None),
        (["push", "folder", "team/x", "--rollouts"], "--rollouts", None),
        (["push", "small", "team/x", "--exclude", "*.txt"], "--exclude", None),
        (["pull", "team/x", "small/config.json"], "DIR", "small/config.json"),
    ],
)
@pytest.mark.usefixtures("model")
def test_what_cannot_be_pushed_or_pulled_is_named(
    hub: Hub, tmp_path: Path, words: list[str], key: str, value: str | None
):
    (tmp_path / "folder").mkdir()
    error = refusal(*words)
    assert (error.key, error.value) == (key, value)
    assert hub.calls == []


def test_a_folder_with_a_run_at_work_is_not_pushed(hub: Hub, tmp_path: Path):
    run = write_run(tmp_path / "outputs" / "mill", [0.1])
    with hold(run):
        assert refusal("push", tmp_path / "outputs", "team/x", "--dataset").value == str(run)
    assert hub.calls == []


@pytest.mark.parametrize(
    ("file", "text", "key"),
    [
        ("notes.txt", "the key is the-value-of-a-variable, really", None),
        ("deep/log.bin", "x" * (1 << 20) + "the-value-of-a-variable", None),
        ("judge.yaml", "judge: {api_key: anything}", "judge.api_key"),
        ("rl.toml", 'note = "use hf_abcdefghijklmnopqrstuvwxyz"', "note"),
        ("broken.toml", "the-value-of-a-variable", None),
    ],
)
def test_a_secret_in_a_file_of_a_folder(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, key: str | None
):
    monkeypatch.setenv("TEAM_API_KEY", "the-value-of-a-variable")
    path = tmp_path / "folder" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    error = refusal("push", tmp_path / "folder", "team/x", "--dataset")
    assert (error.file, error.key, error.value, hub.calls) == (path, key, None, [])
    (tmp_path / "folder" / "data.txt").write_text("the rest")
    assert main(["push", str(tmp_path / "folder"), "team/x", "--dataset", "--exclude", path.name]) == 0


def test_the_key_of_a_server_in_a_log_of_a_run(hub: Hub, run: Path):
    error = refusal("push", run.parent, "team/x", "--dataset")
    assert error.file == run / "logs" / "inference.log"


def test_a_setting_that_names_a_variable_is_not_a_secret(hub: Hub, tmp_path: Path):
    run = write_run(tmp_path / "outputs" / "mill", [0.1], keys={"launch.env_from": {"WANDB_API_KEY": "MY_KEY"}})
    (tmp_path / "outputs" / "mine.yaml").write_text("auth: {wandb_api_key: MY_KEY}")
    assert main(["push", str(run), "team/mill"]) == 0
    assert main(["push", str(run.parent), "team/all", "--dataset"]) == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("orchestrator.train.env.0.args.api_key", "anything"),
        ("orchestrator.train.env.0.args.note", "use hf_abcdefghijklmnopqrstuvwxyz"),
        ("orchestrator.train.env.0.args.note", "the-value-of-a-variable"),
    ],
)
def test_a_secret_among_the_settings_of_a_run(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
):
    monkeypatch.setenv("TEAM_API_KEY", "the-value-of-a-variable")
    run = write_run(tmp_path / "outputs" / "mill", [0.1], keys={key: value})
    error = refusal("push", run, "team/mill")
    assert (error.key, error.file, hub.calls) == (key, run / "config.toml", [])
    assert value not in str(error)


def test_somebody_else_pushed_in_between(hub: Hub, model: Path):
    main(["push", str(model), "team/small"])
    (model / "tokenizer.json").write_text("other")
    repository = Repository("team/small", "model", "HF_TOKEN")
    seen = repository.snapshot("main")
    assert seen is not None
    main(["push", str(model), "team/small"])
    with pytest.raises(HubFailure):
        repository.commit({"more.json": b"{}"}, [], "late", "main", seen.commit)
