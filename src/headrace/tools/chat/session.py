"""A conversation with a served model, from the first question to the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from headrace.errors import BadInput
from headrace.inference.client.chat_stream import ChatClient, ReplyChunk, StreamedReply
from headrace.inference.client.openai_client import ModelEntry, OpenAIError, OpenAIRejected
from headrace.tools.chat.commands import Leave, obey, question_in, read_line
from headrace.tools.chat.conversation import Conversation
from headrace.tools.chat.terminal import Terminal

NEVER_UPDATED = "0-0"
"""The version of weights that are as the model came."""


class ContextFull(OpenAIRejected):
    """The conversation is as long as the model takes, or longer. The message says how long."""


class Session:
    """A model of a server, and what has been said to it."""

    def __init__(self, server: ChatClient, model: ModelEntry, conversation: Conversation) -> None:
        self.server, self.model, self.conversation = server, model, conversation

    def pieces(self, question: str, reply: StreamedReply) -> Generator[ReplyChunk, None, None]:
        """Ask, and go through the reply. A question without any answer is taken back, an answer cut off is kept."""
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
        """What there is to know about a reply that took so long."""
        facts = []
        if reply.usage is not None:
            tokens = reply.usage.completion_tokens
            facts += [f"{tokens} tokens", f"{tokens / seconds:.1f} tokens/s"]
        facts.append(reply.finish_reason or "stopped")
        if (version := self.server.weights_version()) not in (None, NEVER_UPDATED):
            facts.append(f"weights {version}")
        used, longest = self._used(reply), self.model.max_model_len
        if longest is not None and used:
            facts.append(f"context {used} of {longest}")
            if reply.finish_reason == "length" and used >= longest:
                facts.append("which is full: /reset forgets what was said")
        return ", ".join(facts)

    def _used(self, reply: StreamedReply) -> int:
        return 0 if reply.usage is None else reply.usage.prompt_tokens + reply.usage.completion_tokens

    def _context_full(self, error: OpenAIRejected) -> ContextFull | None:
        """What to say of a request that was refused because the conversation is too long; None of any other."""
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


def talk(session: Session, terminal: Terminal, read: Callable[[str], str]) -> None:
    """Until whoever is at the terminal leaves. `read` shows a prompt and returns a line; it raises as `input` does."""
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
            question = question_in(line)
            if question is None:
                terminal.note(obey(session.conversation, line))
            else:
                interrupted = not answer(session, terminal, question)
        except Leave:
            return
        except (BadInput, OpenAIError) as error:
            terminal.complain(str(error))


def answer(session: Session, terminal: Terminal, question: str) -> bool:
    """Show the reply as it comes; False if it was interrupted."""
    reply, began = StreamedReply(), time.monotonic()
    pieces = session.pieces(question, reply)
    try:
        for piece in pieces:
            terminal.show(piece)
    except KeyboardInterrupt:
        pieces.close()  # hangs up: the server gives the request up
    terminal.note(session.describe(reply, time.monotonic() - began))
    return reply.finish_reason is not None
