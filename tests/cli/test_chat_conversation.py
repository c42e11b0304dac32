"""What is said in a chat, and the commands, without a terminal or a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.chat import read_overrides
from headrace.errors import BadInput
from headrace.launch.server_target import base_url, key_in
from headrace.tools.chat import (
    HELP,
    Conversation,
    ExitChat,
    read_line,
    run_chat_command,
)
from tests.refusals import refused


def typed(*lines: str) -> Callable[[str], str]:
    """Somebody who types these lines."""
    left: Iterator[str] = iter(lines)
    return lambda prompt: next(left)


def test_a_line_goes_on_after_a_backslash():
    assert read_line(typed("one \\", "two\\", "", "three")) == "one \ntwo"


def test_the_system_message_comes_first_and_can_be_exchanged():
    conversation = Conversation("Be brief.")
    conversation.ask("Hello?")
    assert [message["role"] for message in conversation.prompt()] == ["system", "user"]
    run_chat_command(conversation, "/system Be long.")
    assert conversation.prompt()[0]["content"] == "Be long."
    run_chat_command(conversation, "/system")
    assert [message["role"] for message in conversation.prompt()] == ["user"]


def test_thoughts_are_kept_but_not_sent_again():
    conversation = Conversation()
    conversation.ask("Hello?")
    conversation.answer({"role": "assistant", "content": "Hi.", "reasoning_content": "Greet."})
    assert conversation.prompt()[-1] == {"role": "assistant", "content": "Hi."}
    assert conversation.transcript()[-1]["reasoning_content"] == "Greet."


def test_reset_forgets_what_was_said_and_keeps_part_and_settings():
    conversation = Conversation("Be brief.")
    run_chat_command(conversation, "/set temperature .5")
    conversation.ask("Hello?")
    run_chat_command(conversation, "/reset")
    assert conversation.prompt() == [{"role": "system", "content": "Be brief."}]
    assert conversation.settings == {"temperature": 0.5}


def test_settings_are_set_shown_and_left_to_the_server_again():
    conversation = Conversation()
    assert run_chat_command(conversation, "/set") == "all as the server has it"
    run_chat_command(conversation, "/set temperature .7")
    assert run_chat_command(conversation, "/set max_tokens=20") == "temperature 0.7, max_tokens 20"
    assert run_chat_command(conversation, "/set temperature default") == "max_tokens 20"
    assert conversation.settings == {"max_tokens": 20}


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("/set warmth 1", {"key": "warmth"}),
        ("/set seed 1.5", {"key": "seed", "value": "1.5"}),
        ("/set temperature hot", {"key": "temperature", "value": "hot"}),
        ("/set seed", {"key": "/set", "value": "seed"}),
        ("/save", {"key": "/save"}),
        ("/save /no/such/folder/chat.jsonl", {"file": Path("/no/such/folder/chat.jsonl")}),
        ("/dance", {"value": "/dance"}),
    ],
)
def test_what_cannot_be_done_is_refused(line: str, fields: dict[str, Any]):
    with refused(**fields):
        run_chat_command(Conversation(), line)


def test_what_is_saved_is_a_message_per_line(tmp_path: Path):
    conversation = Conversation("Sei kurz.")
    conversation.ask("Grüße?")
    file = tmp_path / "chat.jsonl"
    assert run_chat_command(conversation, f"/save {file}") == f"wrote 2 messages to {file}"
    assert "Grüße" in file.read_text(encoding="utf-8")
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == conversation.transcript()


@pytest.mark.parametrize("line", ["/exit", "/quit"])
def test_leaving(line: str):
    with pytest.raises(ExitChat):
        run_chat_command(Conversation(), line)


def test_help_names_every_command():
    assert run_chat_command(Conversation(), "/help") == HELP
    for command in ("/reset", "/system", "/set", "/save", "/exit"):
        assert f"\n{command} " in f"\n{HELP}"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://host:1/v1/", "http://host:1/v1"),
        ("https://host/openai/v1", "https://host/openai/v1"),
    ],
)
def test_an_address_is_completed_where_it_has_no_path(given: str, meant: str):
    assert base_url(given) == meant


def test_what_is_no_address_or_no_key_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BadInput) as error:
        base_url("ftp://host")
    assert error.value.value == "ftp://host"
    monkeypatch.setenv("A_KEY", "kéy")
    with pytest.raises(BadInput) as error:
        key_in("A_KEY")
    assert error.value.key == "A_KEY"
    assert key_in("NO_SUCH_KEY") is None


def test_keys_of_a_started_server_are_written_as_in_a_run_file():
    assert read_overrides(["--inference.engine", "vllm", "--inference.max_model_len=64"]) == [
        "--engine",
        "vllm",
        "--max_model_len=64",
    ]
    with refused(BadInput, key="--trainer.lr"):
        read_overrides(["--trainer.lr", "1"])
