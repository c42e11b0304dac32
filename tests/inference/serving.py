"""An engine behind its HTTP interface, in the process of the test."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from headrace.inference.backend import Backend
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.embedded.backend import EmbeddedBackend
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.grammar import Grammars
from headrace.inference.embedded.service import EngineService
from headrace.inference.keys import Keys
from headrace.inference.server.app import App
from headrace.inference.server.chat import Chat
from headrace.inference.server.http_server import HttpServer, bind, url_of
from headrace.inference.weights.reading import READ_TIMEOUT_S
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer

ADMIN_KEY = "only-for-tests"


def chat_of(model_directory: Path) -> Chat:
    tokenizer = Tokenizer(model_directory)
    return Chat("tiny", tokenizer, make_renderer(model_directory, tokenizer))


@contextlib.asynccontextmanager
async def served(backend: Backend, chat: Chat, keys: Keys | None = None, **options: Any) -> AsyncIterator[str]:
    """Serve an engine for a while, then end it; gives the server's address."""
    server = HttpServer(App(backend, chat, keys or Keys((), (ADMIN_KEY,)), **options))
    listener = bind("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.listening.wait()
    try:
        yield url_of(listener)
    finally:
        await backend.close()
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def client_of_engine(
    engine: Engine, model_directory: Path, chat: Chat | None = None
) -> AsyncIterator[EngineClient]:
    """Serve an engine for a while, as "tiny" unless a chat has another name; gives a client of it."""
    backend = await connect(engine)
    async with served(backend, chat or chat_of(model_directory)) as url:
        client = EngineClient([url], admin_key=ADMIN_KEY)
        try:
            yield client
        finally:
            await client.close()


async def connect(
    engine: Engine,
    max_waiting: int = 4096,
    kind: type[EmbeddedBackend] = EmbeddedBackend,
    read_timeout_s: float = READ_TIMEOUT_S,
) -> Any:
    """The server's end of a connection to this engine, which runs in a thread instead of a process."""
    ours, theirs = socket.socketpair()
    service = EngineService(engine, theirs, read_timeout_s=read_timeout_s)
    threading.Thread(target=service.run, daemon=True).start()
    return await kind.connect(ours, max_waiting)


@contextlib.contextmanager
def blocked(path: Path) -> Iterator[None]:
    """A file that blocks a process that opens it, as on a mount whose server is gone: for 45 s or the block."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # sent to the holder of a lease
    holder = os.open(path, os.O_RDWR)
    fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        yield
    finally:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(holder)
        signal.signal(signal.SIGIO, before)


def engine_of(model: Any, model_directory: Path, **options: Any) -> Engine:
    """The embedded engine as its process loads it, small."""
    given = {"max_model_len": 128, "max_running": 8, "eos_token_ids": [258], **options}
    tokenizer = Tokenizer(model_directory)
    grammars = Grammars(tokenizer.backend, model.get_input_embeddings().num_embeddings, given["eos_token_ids"])
    texts = {"decode": tokenizer.decode, "special_tokens": tokenizer.control_tokens, "grammars": grammars}
    return Engine(model, **texts, **given)


async def backend_of(model: Any, model_directory: Path, max_waiting: int = 4096, **options: Any) -> EmbeddedBackend:
    """The server's end of a connection to a small engine."""
    backend: EmbeddedBackend = await connect(engine_of(model, model_directory, **options), max_waiting)
    return backend
