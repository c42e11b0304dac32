"""The messages and sampling settings of a chat, and its commands. No terminal, no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import BadInput

Message = dict[str, Any]

SETTINGS: Mapping[str, type[int] | type[float]] = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}
"""Sampling settings by their OpenAI names; the server chooses those that are not set."""
UNSET = "default"
"""The value that removes a setting."""
PROMPT, CONTINUATION = "> ", ". "
HELP = f"""\
/reset               forget the messages
/system TEXT         set the system message; without TEXT, remove it
/set NAME VALUE      temperature, top_p, max_tokens or seed; {UNSET} leaves it to the server; without NAME, show them
/save FILE           write the conversation, a JSON message per line
/exit                leave, as Ctrl-D does
A line that ends with \\ continues in the next. A line that begins with // is sent with one /.
Ctrl-C stops a reply; at the prompt, twice, it leaves."""


class ExitChat(Exception):
    """The user leaves the chat."""


class Conversation:
    """The system message, and user messages with their replies in turn."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[Message] = []
        self.settings: dict[str, int | float] = {}

    def ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})

    def answer(self, message: Message) -> None:
        self.messages.append(message)

    def withdraw(self) -> None:
        """Remove a question that got no answer."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def set(self, name: str, text: str) -> None:
        """Parse and set a sampling setting; raises `BadInput` for an unknown name or a wrong value."""
        if name not in SETTINGS:
            raise BadInput("unknown setting", key=name, fix=f"Known: {', '.join(SETTINGS)}.")
        if text == UNSET:
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = SETTINGS[name](text)
        except ValueError as error:
            kind = "a whole number" if SETTINGS[name] is int else "a number"
            raise BadInput(f"must be {kind}, or {UNSET}", key=name, value=text) from error

    def transcript(self) -> list[Message]:
        """Return all messages, with reasoning."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def prompt(self) -> list[Message]:
        """Return the messages of the next request, without the reasoning of earlier replies."""
        return [{key: value for key, value in said.items() if key != "reasoning_content"} for said in self.transcript()]


def read_line(read: Callable[[str], str]) -> str:
    """Read a line and those that continue it after a backslash; `read` shows a prompt and returns a line."""
    lines = [read(PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(CONTINUATION))
    return "\n".join(lines).strip()


def question_of(line: str) -> str | None:
    """Return the text for the model; None if the line is a command."""
    if line.startswith("//"):
        return line[1:]
    return None if line.startswith("/") else line


def run_chat_command(conversation: Conversation, line: str) -> str:
    """Run a command and return its output; raises `ExitChat`, or `BadInput` for an invalid command."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    match command:
        case "/help":
            return HELP
        case "/exit" | "/quit":
            raise ExitChat
        case "/reset":
            conversation.messages.clear()
            return "forgotten"
        case "/system":
            conversation.system = rest or None
            return "system message set" if rest else "no system message"
        case "/set":
            return _set(conversation, rest)
        case "/save":
            return _save(conversation, rest)
    raise BadInput("unknown command", value=command, fix="/help lists them; // sends a line that begins with /")


def _set(conversation: Conversation, rest: str) -> str:
    if rest:
        name, _, value = rest.replace("=", " ", 1).partition(" ")
        if not value.strip():
            raise BadInput("the value is missing", key="/set", value=name, fix=f"Write /set {name} VALUE")
        conversation.set(name, value.strip())
    settings = conversation.settings.items()
    return ", ".join(f"{name} {value:g}" for name, value in settings) or "all as the server has it"


def _save(conversation: Conversation, file: str) -> str:
    if not file:
        raise BadInput("the file is missing", key="/save", fix="Write /save FILE")
    path, messages = Path(file).expanduser(), conversation.transcript()
    lines = "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in messages)
    try:
        path.write_text(lines, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot be written: {error.strerror}", file=path) from error
    return f"wrote {len(messages)} messages to {path}"
