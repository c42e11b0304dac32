"""A chat in the terminal with a served model: messages, settings and commands, and replies as they are generated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from headrace.errors import BadInput
from headrace.inference.client.chat_stream import ChatClient, ReplyChunk, StreamedReply
from headrace.inference.client.openai_client import ModelEntry, OpenAIError, OpenAIRejected
from headrace.observe.console import SafeConsole

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


INITIAL_VERSION = "0-0"
"""The version of weights that were never updated."""
STYLES = {"text": "", "thought": "dim", "call": "cyan"}


class ContextFull(OpenAIRejected):
    """The conversation has reached the model's maximum length, which the message states."""


class Session:
    """A conversation with one model of a server."""

    def __init__(self, server: ChatClient, model: ModelEntry, conversation: Conversation) -> None:
        self.server, self.model, self.conversation = server, model, conversation

    def stream(self, question: str, reply: StreamedReply) -> Generator[ReplyChunk, None, None]:
        """Yield the chunks of the reply. A question without an answer is removed, a truncated answer is kept."""
        conversation = self.conversation
        conversation.ask(question)
        body: dict[str, Any] = {"model": self.model.id, "messages": conversation.prompt(), **conversation.settings}
        try:
            yield from self.server.stream(body, reply)
        except OpenAIRejected as error:
            if (full := self._context_full(error)) is not None:
                raise full from error
            raise
        finally:
            message = reply.message()
            if message.get("content") or message.get("tool_calls"):
                conversation.answer(message)
            else:
                conversation.messages.pop()

    def describe(self, reply: StreamedReply, seconds: float) -> str:
        """Return tokens, speed, finish reason, weights version and used context of a reply."""
        facts, used = [], 0
        if reply.usage is not None:
            tokens = reply.usage.completion_tokens
            used = reply.usage.prompt_tokens + tokens
            facts += [f"{tokens} tokens", f"{tokens / seconds:.1f} tokens/s"]
        facts.append(reply.finish_reason or "stopped")
        if (version := self.server.weights_version()) not in (None, INITIAL_VERSION):
            facts.append(f"weights {version}")
        longest = self.model.max_model_len
        if longest is not None and used:
            facts.append(f"context {used} of {longest}")
            if reply.finish_reason == "length" and used >= longest:
                facts.append("which is full: /reset forgets what was said")
        return ", ".join(facts)

    def _context_full(self, error: OpenAIRejected) -> ContextFull | None:
        """Return the error for a conversation that is too long; None if the request was rejected for another reason."""
        longest = self.model.max_model_len
        if longest is None or error.status not in (400, 413, 422):
            return None
        length = self.server.count_tokens(self.model.id, self.conversation.prompt())
        if length is None or length < longest:
            return None
        return ContextFull(
            f"the conversation has {length} tokens, and the model takes {longest}, its reply included: "
            "/reset forgets what was said",
            error.status,
        )


class Terminal:
    """Prints the chunks of replies, and notes on lines of their own."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or SafeConsole()
        self._kind: str | None = None
        self._at_line_start = True

    def show(self, chunk: ReplyChunk) -> None:
        if self._kind != chunk.kind and "thought" in (self._kind, chunk.kind):
            self._break_line()
        self._kind = chunk.kind
        self._write(chunk.text, STYLES[chunk.kind])

    def note(self, text: str, style: str = "dim") -> None:
        """Print text that is not the model's on a line of its own."""
        self._break_line()
        self._write(text + "\n", style)

    def _break_line(self) -> None:
        if not self._at_line_start:
            self._write("\n")
        self._kind = None

    def _write(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), end="", soft_wrap=True)
        self._at_line_start = text.endswith("\n")


def talk(session: Session, terminal: Terminal, read: Callable[[str], str]) -> None:
    """Chat until the user leaves. `read` shows a prompt and returns a line; it raises as `input` does."""
    interrupted = False
    while True:
        try:
            line = read_line(read)
        except EOFError:
            terminal.note("")
            return
        except KeyboardInterrupt:
            terminal.note("")
            if interrupted:
                return
            interrupted = True
            terminal.note("Ctrl-C again leaves, and so do Ctrl-D and /exit")
            continue
        interrupted = False
        if not line:
            continue
        try:
            if line.startswith("/") and not line.startswith("//"):
                terminal.note(run_chat_command(session.conversation, line))
            else:
                question = line[1:] if line.startswith("//") else line
                interrupted = not _show_answer(session, terminal, question)
        except ExitChat:
            return
        except (BadInput, OpenAIError) as error:
            terminal.note(str(error), "red")


def _show_answer(session: Session, terminal: Terminal, question: str) -> bool:
    """Show the reply while it is generated; returns False if it was interrupted."""
    reply, began = StreamedReply(), time.monotonic()
    chunks = session.stream(question, reply)
    try:
        for chunk in chunks:
            terminal.show(chunk)
    except KeyboardInterrupt:
        chunks.close()  # closes the connection, so that the server cancels the request
    terminal.note(session.describe(reply, time.monotonic() - began))
    return reply.finish_reason is not None
