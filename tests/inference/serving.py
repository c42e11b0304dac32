"""An engine behind its HTTP interface, in the process of the test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.server.app import App
from headrace.inference.server.chat import Chat
from headrace.inference.server.main import HttpServer, bind, url_of
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer


@contextlib.asynccontextmanager
async def client_of_engine(
    engine: Engine, model_directory: Path, chat: Chat | None = None
) -> AsyncIterator[EngineClient]:
    """Serve an engine for a while, as "tiny" unless a chat has another name; gives a client of it."""
    tokenizer = Tokenizer(model_directory)
    thread = EngineThread(engine)
    server = HttpServer(App(thread, chat or Chat("tiny", tokenizer, make_renderer(model_directory, tokenizer))))
    listener = bind("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.listening.wait()
    client = EngineClient([url_of(listener)])
    try:
        yield client
    finally:
        await client.close()
        await asyncio.to_thread(thread.stop)
        server.should_exit = True
        await serving
