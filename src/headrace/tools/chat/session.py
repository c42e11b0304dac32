"""A chat in the terminal: questions go to a served model, and its replies are shown while they are generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from rich.console import Console
from rich.text import Text

from headrace.errors import BadInput
from headrace.inference.client.chat_stream import ChatClient, ReplyChunk, StreamedReply
from headrace.inference.client.openai_client import ModelEntry, OpenAIError, OpenAIRejected
from headrace.observe.console import SafeConsole
from headrace.tools.chat.conversation import Conversation, ExitChat, question_of, read_line, run_chat_command

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
                conversation.withdraw()

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
            question = question_of(line)
            if question is None:
                terminal.note(run_chat_command(session.conversation, line))
            else:
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
