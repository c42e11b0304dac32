"""What cannot be done is said in a sentence, with what to do about it, and nothing has happened."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.hub.errors import HubFailure
from headrace.hub.repository import Repository
from tests.hub.conftest import write_model
from tests.hub.stand_in import READER, WRITER, Hub
from tests.observe.runs import write_run


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


def test_without_a_token(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_TOKEN")
    code, err = said(capsys, "push", model, "team/small")
    assert (code, hub.calls) == (2, [])
    assert "HF_TOKEN is not set" in err
    code, err = said(capsys, "push", model, "team/small", "--token-var", "TEAM_TOKEN")
    assert "TEAM_TOKEN is not set" in err


def test_a_token_that_the_hub_does_not_take(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_expired_long_ago")
    code, err = said(capsys, "push", model, "team/small")
    assert code == 2
    assert "the hub does not take the token in HF_TOKEN" in err
    assert "hf_expired_long_ago" not in err


def test_a_token_that_may_not_write(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", READER)
    code, err = said(capsys, "push", model, "team/small")
    assert code == 2
    assert "may not do this with model repository team/small" in err


def test_a_repository_that_is_not_there_or_not_to_be_seen(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    code, err = said(capsys, "pull", "team/nothing", "copy")
    assert code == 2
    assert "no model repository team/nothing with a revision main" in err
    main(["push", str(model), "team/small"])
    monkeypatch.delenv("HF_TOKEN")
    code, err = said(capsys, "pull", "team/small", "copy")
    assert code == 2
    assert "it may need a token" in err
    monkeypatch.setenv("HF_TOKEN", WRITER)
    code, err = said(capsys, "pull", "team/small", "copy", "--revision", "gone")
    assert (code, "with a revision gone" in err) == (2, True)


def test_a_repository_with_other_content(hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["push", str(model), "team/small"])
    other = write_model(tmp_path / "other", seed=3)
    (other / "tokenizer.json").rename(other / "vocabulary.json")
    code, err = said(capsys, "push", other, "team/small")
    assert code == 2
    assert "team/small has the model small, not the model other" in err
    assert main(["push", str(other), "team/small", "--replace"]) == 0
    files = {".gitattributes", "README.md", "headrace.json", "config.json", "model.safetensors", "vocabulary.json"}
    assert hub.files("models/team/small") == files


def lose(hub: Hub, name: str, file: str) -> None:
    """A commit by somebody else, in which a file is gone."""
    repo = hub.repos[name]
    repo.add("main", {path: content for path, content in repo.commits[repo.branches["main"]].items() if path != file})


def test_a_repository_that_somebody_filled_by_hand(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]):
    main(["push", str(model), "team/small"])
    lose(hub, "models/team/small", "headrace.json")
    code, err = said(capsys, "push", model, "team/small")
    assert code == 2
    assert "content that no push of Headrace put there (config.json, model.safetensors, tokenizer.json)" in err


def test_a_push_that_was_cut_off_is_found_out(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]):
    main(["push", str(model), "team/small"])
    lose(hub, "models/team/small", "model.safetensors")
    code, err = said(capsys, "pull", "team/small", "copy")
    assert (code, Path("copy").exists()) == (1, False)
    assert "team/small lacks model.safetensors: the push was cut off or undone; push it again" in err
    assert main(["push", str(model), "team/small"]) == 0
    assert main(["pull", "team/small", "copy"]) == 0


def test_offline_mode(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for words in (("push", model, "team/small"), ("pull", "team/small", "copy")):
        code, err = said(capsys, *words)
        assert (code, hub.calls) == (2, [])
        assert "HF_HUB_OFFLINE is set" in err


@pytest.mark.parametrize("repo", ["small", "team/a/b", "team/with space"])
def test_a_name_that_is_none(hub: Hub, model: Path, repo: str, capsys: pytest.CaptureFixture[str]):
    code, err = said(capsys, "push", model, repo)
    assert code == 2
    assert "is no name of a repository: write OWNER/NAME" in err


def test_what_is_nothing_that_can_be_pushed(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "folder").mkdir()
    assert "data is pushed with --dataset" in said(capsys, "push", tmp_path / "folder", "team/x")[1]
    assert "has no data in it" in said(capsys, "push", tmp_path / "folder", "team/x", "--dataset")[1]
    assert "no such file" in said(capsys, "push", tmp_path / "gone", "team/x")[1]
    assert "are parts of a run" in said(capsys, "push", tmp_path / "folder", "team/x", "--permanent")[1]
    assert hub.calls == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("orchestrator.train.env.0.args.api_key", "anything"),
        ("orchestrator.train.env.0.args.note", "use hf_abcdefghijklmnopqrstuvwxyz"),
        ("orchestrator.train.env.0.args.note", "the-value-of-a-variable"),
    ],
)
def test_a_secret_among_the_settings_of_a_run(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str, value: str
):
    monkeypatch.setenv("TEAM_API_KEY", "the-value-of-a-variable")
    run = write_run(tmp_path / "outputs" / "mill", [0.1], keys={key: value})
    code, err = said(capsys, "push", run, "team/mill")
    assert (code, hub.calls) == (2, [])
    assert f"{key} looks like a secret" in err
    assert value not in err


def test_somebody_else_pushed_in_between(hub: Hub, model: Path):
    main(["push", str(model), "team/small"])
    (model / "tokenizer.json").write_text("other")
    repository = Repository("team/small", "model", WRITER, "HF_TOKEN")
    seen = repository.snapshot("main")
    assert seen is not None
    main(["push", str(model), "team/small"])
    with pytest.raises(HubFailure, match="was changed by somebody else just now: try again"):
        repository.commit({"more.json": b"{}"}, [], "late", "main", seen.commit)
