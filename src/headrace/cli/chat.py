"""`headrace chat`: chat with a model, the model of a run, or any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from headrace.cli.common import progress_line
from headrace.cli.serve import read_target
from headrace.errors import BadInput
from headrace.inference.client.chat_stream import ChatClient, StreamedReply
from headrace.inference.client.openai_client import ModelEntry
from headrace.launch.server_target import find_server, start_server
from headrace.safe_text import unescaped
from headrace.tools.chat import SETTINGS, Conversation, Session, Terminal, talk

PREFIX = "--inference."


def configure_chat(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "target",
        metavar="MODEL|RUN|URL",
        help="a model directory or hub name; a run directory; a server, http://HOST:PORT",
    )
    add("--message", metavar="TEXT", help="ask this, print the answer and leave")
    add("--system", metavar="TEXT", help="the system message")
    add("--temperature", metavar="T", help="0 takes the likeliest token [the server's]")
    add("--top-p", metavar="P", help="sample among the likeliest tokens of this total [the server's]")
    add("--max-tokens", metavar="N", help="of one reply [the server's]")
    add("--seed", metavar="N", help="for reproducible replies [none]")
    add("--model", metavar="NAME", help="which of a server's models [its first]")
    add("--api-key-var", metavar="VAR", default="HEADRACE_API_KEY", help="the variable with its key [HEADRACE_API_KEY]")
    parser.epilog = (
        "Without a terminal, all of the standard input is the question, as with --message. A model is served by "
        "`headrace serve` for as long as the chat lasts: keys of [inference] are written --inference.engine vllm. Of a "
        "run, its running server is used, else its newest weights. In the chat, /help shows the commands."
    )


def run_chat(arguments: argparse.Namespace) -> int:
    conversation = Conversation(arguments.system)
    for name in SETTINGS:
        if (value := getattr(arguments, name)) is not None:
            conversation.set(name, value)
    overrides = read_overrides(arguments.overrides)
    question = arguments.message if sys.stdin.isatty() or arguments.message is not None else _read_stdin()
    if question is not None and not question.strip():
        raise BadInput("the question is empty", key="--message", fix="Give a text, or write one to the standard input.")
    with _connect(arguments.target, overrides, arguments.api_key_var) as server:
        session = Session(server, _choose_model(server, arguments.model), conversation)
        if question is not None:
            output = sys.stdout if sys.stdout.isatty() else unescaped(sys.stdout)  # a program reads the exact text
            for chunk in session.stream(question, StreamedReply()):
                if chunk.kind != "thought":
                    print(chunk.text, end="", file=output, flush=True)
            print(flush=True)
            return 0
        with suppress(ImportError):  # optional in Python builds; makes the line editable
            import readline  # noqa: F401
        terminal = Terminal()
        terminal.note(f"talking to {session.model.id} at {server.address}; /help shows the commands")
        talk(session, terminal, input)
    return 0


@contextmanager
def _connect(target: str, overrides: list[str], key_var: str) -> Iterator[ChatClient]:
    """Yield a client of the target's server, which is started for this context if there is none."""
    if (server := find_server(target, key_var)) is not None:
        with closing(server):
            yield server
        return
    read_target(target, overrides, alone=True)  # errors are raised here, not in the log of the server
    with start_server(target, overrides, progress_line) as server:
        yield server


def read_overrides(dotted: list[str]) -> list[str]:
    """Return the overrides of `headrace serve` from keys that are written as in a run file."""
    for word in dotted:
        if word.startswith("--") and not word.startswith(PREFIX):
            raise BadInput("not a key of the server that is started", key=word, fix=f"Write keys as {PREFIX}KEY.")
    return [f"--{word.removeprefix(PREFIX)}" if word.startswith(PREFIX) else word for word in dotted]


def _choose_model(server: ChatClient, name: str | None) -> ModelEntry:
    models = server.models()
    for model in models:
        if name in (None, model.id):
            return model
    served = ", ".join(model.id for model in models) or "none"
    raise BadInput(f"not served by {server.address}", key="--model", value=name, fix=f"Its models: {served}.")


def _read_stdin() -> str:
    try:
        text = sys.stdin.read()
        text.encode()  # some locales decode invalid UTF-8 to surrogates
    except UnicodeError as error:
        raise BadInput("not UTF-8 text", key="standard input") from error
    return text
