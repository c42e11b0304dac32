"""The lines that are not for the model: what begins with a slash, and what goes on after a backslash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.errors import BadInput
from headrace.tools.chat.conversation import UNSET, Conversation

ASK, GO_ON = "> ", ". "
"""What is shown before a line, and before one that continues another."""

HELP = f"""\
/reset               forget what was said
/system TEXT         the system message; without TEXT, nothing
/set NAME VALUE      temperature, top_p, max_tokens or seed; {UNSET} leaves it to the server; without NAME, show them
/save FILE           write the conversation, a JSON message per line
/exit                leave, as Ctrl-D does
A line that ends with \\ goes on in the next. // at the beginning says a line that begins with /.
Ctrl-C stops a reply; at the prompt, twice, it leaves."""


class Leave(Exception):
    """Nothing more is to be said."""


def read_line(read: Callable[[str], str]) -> str:
    """What was typed, over as many lines as end with a backslash. `read` shows its argument and returns a line."""
    lines = [read(ASK)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(GO_ON))
    return "\n".join(lines).strip()


def question_in(line: str) -> str | None:
    """What a line says to the model; None if it is a command."""
    if line.startswith("//"):
        return line[1:]
    return None if line.startswith("/") else line


def obey(conversation: Conversation, line: str) -> str:
    """Carry out a command; returns what there is to tell. Raises `Leave`, and `BadInput` for what cannot be done."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    match command:
        case "/help":
            return HELP
        case "/exit" | "/quit":
            raise Leave
        case "/reset":
            conversation.reset()
            return "forgotten"
        case "/system":
            conversation.system = rest or None
            return "it will be told" if rest else "it is told nothing"
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
    path = Path(file).expanduser()
    try:
        path.write_text(conversation.json_lines(), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot be written: {error.strerror}", file=path) from error
    return f"wrote {len(conversation.transcript())} messages to {path}"
