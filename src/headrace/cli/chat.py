"""`headrace chat`: talk to a model, to the model of a run, or to any server that speaks OpenAI's interface."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from headrace.errors import BadInput

if TYPE_CHECKING:
    from headrace.inference.client.chat_stream import ChatClient
    from headrace.inference.client.openai_client import ModelEntry
    from headrace.tools.chat.session import Session

PREFIX = "--inference."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="MODEL|RUN|URL",
        help="a model directory or hub name; a run directory; a server, http://HOST:PORT",
    )
    parser.add_argument("--message", metavar="TEXT", help="ask this, print the answer and leave")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", metavar="T", help="0 takes the likeliest token [the server's]")
    parser.add_argument("--top-p", metavar="P", help="sample among the likeliest tokens of this total [the server's]")
    parser.add_argument("--max-tokens", metavar="N", help="of one reply [the server's]")
    parser.add_argument("--seed", metavar="N", help="for replies that can be had again [none]")
    parser.add_argument("--model", metavar="NAME", help="which of a server's models [its first]")
    parser.add_argument(
        "--api-key-var", metavar="VAR", default="HEADRACE_API_KEY", help="the variable with its key [HEADRACE_API_KEY]"
    )
    parser.epilog = (
        "Without a terminal, all of the standard input is the question, as with --message. A model is served by "
        "`headrace serve` for as long as the chat lasts: keys of [inference] are written --inference.engine vllm. Of a "
        "run, the server that runs is taken, else its newest weights. In the chat, /help shows the commands."
    )


def run(arguments: argparse.Namespace) -> int:
    from headrace.tools.chat.conversation import SETTINGS, Conversation
    from headrace.tools.chat.session import Session

    conversation = Conversation(arguments.system)
    for name in SETTINGS:
        if (value := getattr(arguments, name)) is not None:
            conversation.set(name, value)
    overrides = read_overrides(arguments.overrides)
    question = arguments.message if sys.stdin.isatty() or arguments.message is not None else _piped()
    if question is not None and not question.strip():
        raise BadInput("there is nothing to ask: --message or the standard input is empty")
    with reach(arguments.target, overrides, arguments.api_key_var) as server:
        session = Session(server, choose(server, arguments.model), conversation)
        if question is not None:
            print_answer(session, question)
        else:
            _talk(session)
    return 0


@contextmanager
def reach(target: str, overrides: list[str], key_var: str) -> Iterator[ChatClient]:
    """The server that is meant; one that must be started first ends with this."""
    from headrace.cli.serve import read_target
    from headrace.launch.server_target import find_server, start_server

    if (server := find_server(target, key_var)) is not None:
        with closing(server):
            yield server
        return
    read_target(target, overrides, alone=True)  # what is wrong with it is said here, and not in a log
    with start_server(target, overrides, _progress) as server:
        yield server


def read_overrides(dotted: list[str]) -> list[str]:
    """What a server is started with, from keys that are written as in a run file."""
    for word in dotted:
        if word.startswith("--") and not word.startswith(PREFIX):
            raise BadInput(f"{word}: of a server that is started for a chat, keys are written {PREFIX}KEY")
    return [f"--{word.removeprefix(PREFIX)}" if word.startswith(PREFIX) else word for word in dotted]


def choose(server: ChatClient, name: str | None) -> ModelEntry:
    """The model that is meant, or the first that the server has."""
    models = server.models()
    for model in models:
        if name in (None, model.id):
            return model
    known = ", ".join(model.id for model in models) or "none"
    raise BadInput(f"{server.address} does not serve {name or 'any model'}; its models are: {known}")


def print_answer(session: Session, question: str) -> None:
    """The answer alone, for scripts, as it comes; its thoughts are left out."""
    from headrace.inference.client.chat_stream import StreamedReply
    from headrace.tools.chat.terminal import harmless

    to_terminal = sys.stdout.isatty()
    for piece in session.pieces(question, StreamedReply()):
        if piece.kind != "thought":
            print(harmless(piece.text) if to_terminal else piece.text, end="", flush=True)
    print(flush=True)


def _piped() -> str:
    try:
        text = sys.stdin.read()
        text.encode()  # in some locales what is no UTF-8 is read all the same, as halves of characters
    except UnicodeError as error:
        raise BadInput("the standard input is not UTF-8 text") from error
    return text


def _talk(session: Session) -> None:
    from headrace.tools.chat.session import talk
    from headrace.tools.chat.terminal import Terminal

    with suppress(ImportError):  # some Pythons are built without; it gives lines that can be edited
        import readline  # noqa: F401
    terminal = Terminal()
    terminal.note(f"talking to {session.model.id} at {session.server.address}; /help shows the commands")
    talk(session, terminal, input)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal, which goes away."""
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:
        yield lambda words: status.update(Text(words))
