"""`headrace serve`: load a model, listen, say where, end cleanly when told to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.errors import Failure
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import (
    check_engine,
    eos_token_ids,
    load_model,
    max_model_len,
    refuse_unsupported,
)
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.server.app import App
from headrace.inference.server.chat import Chat
from headrace.inference.weights.link import WeightsUnreachable
from headrace.inference.weights.published import WeightsError
from headrace.observe.status import Status
from headrace.rollout.version import Version
from headrace.text.hub import model_directory
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.transport.endpoint import Endpoint, withdraw_endpoint, write_endpoint
from headrace.transport.run_dir import RunDir
from headrace.transport.weights_link import is_linked

log = logging.getLogger(__name__)

KEEP_ALIVE = 120
"""Seconds that an idle connection stays: longer than clients keep theirs, so that none is cut under a request."""
GAUGE_INTERVAL = 1.0


class CannotListen(Failure):
    """The address is not to be had. The message is complete: print it and stop."""


def serve(config: InferenceConfig, *, status: Status | None, run: RunDir | None) -> None:
    """Serve until SIGTERM or SIGINT."""
    if config.model.name is None:
        raise ConfigError("inference.model.name is not set: give a model directory or a name on the hub")
    if status is not None:
        status.set("loading model")
    if run is not None:
        _endpoint(run, status).unlink(missing_ok=True)  # a server that was killed could not take it down
    with bind(config.host, config.port) as listener:
        engine, chat = load(config, config.model.name)
        asyncio.run(_serve(engine, chat, listener, status, run))


def _endpoint(run: RunDir, status: Status | None) -> Path:
    """Where this server says where it listens: there may be several in a run."""
    return run.endpoints / f"{'inference' if status is None else status.current.process}.json"


def load(config: InferenceConfig, name: str) -> tuple[Engine, Chat]:
    """The engine, and the chat in front of it."""
    directory = model_directory(name)
    tokenizer = Tokenizer(directory)
    renderer = make_renderer(directory, tokenizer, **config.renderer.model_dump())
    model = load_model(directory, config.model.dtype, trust_remote_code=config.model.trust_remote_code)
    refuse_unsupported(model)
    engine = Engine(
        model,
        max_model_len=max_model_len(model, config.max_model_len),
        max_running=config.max_running,
        kv_on_update=config.kv_on_update,
        eos_token_ids=eos_token_ids(model, tokenizer.eos_token_id),
        seed=config.seed,
        base=directory,
    )
    check_engine(engine)
    return engine, Chat(config.served_name or name, tokenizer, renderer)


def bind(host: str, port: int) -> socket.socket:
    """A socket on that address, not yet listening: callers are refused until the model is there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    if error.errno == errno.EADDRINUSE:
        return CannotListen(f"inference.port {port} on {host} is in use: choose another, or 0 for any free port")
    return CannotListen(f"cannot listen on inference.host {host}, inference.port {port}: {error.strerror}")


async def _serve(
    engine: Engine, chat: Chat, listener: socket.socket, status: Status | None, run: RunDir | None
) -> None:
    thread = EngineThread(engine)
    if run is not None:
        await asyncio.to_thread(_catch_up, thread, run)
    server = HttpServer(App(thread, chat))
    url = url_of(listener)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    gauges: asyncio.Task[None] | None = None
    try:
        await _wait(server.listening, serving)
        log.info("serving %s on %s", chat.model_name, url)
        if run is not None:
            write_endpoint(_endpoint(run, status), Endpoint(url, os.getpid()))
        if status is not None:
            gauges = asyncio.create_task(_report(engine, status, url))
        await _wait(stop, serving)
        log.info("stopping")
    finally:
        if run is not None:
            withdraw_endpoint(_endpoint(run, status), os.getpid())
        if gauges is not None:
            gauges.cancel()
        await asyncio.to_thread(thread.stop)  # answers what is in flight, before connections close
        server.should_exit = True
        await serving


def _catch_up(thread: EngineThread, run: RunDir) -> None:
    """Restarted in the middle of a run: nobody shall sample from the initial model until someone notices.

    The trainer goes on meanwhile: each try begins with the newest version that was not tried.
    """
    tried: set[Version] = set()
    lost: Version | None = None
    while left := [version for version in run.weights.published() if version not in tried]:
        version = left[-1]
        tried.add(version)
        path = run.weights.path(version)
        if lost is not None and version < lost and is_linked(path):
            continue  # where the newer one could not be had: each try may take a minute
        try:
            thread.update_weights(path, version)
        except WeightsError as error:  # damaged by a power loss, say: the trainer publishes its own anew
            log.warning("weights %s cannot be loaded: %s", version, error)
            if isinstance(error, WeightsUnreachable):
                lost = version
        else:
            log.info("starting at version %s", version)
            return


async def _wait(event: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Wait for an event; a server that ends before it ends the wait, too, with its error."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if serving.done():
        serving.result()


class HttpServer(uvicorn.Server):
    """uvicorn that says when it listens, and leaves signals alone: it would raise them again after a clean end."""

    def __init__(self, app: App) -> None:
        super().__init__(
            uvicorn.Config(
                app.asgi(),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=1,
            )
        )
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # two may bind one port; only the first may listen
            host, port = (sockets or [])[0].getsockname()[:2]
            raise _cannot_listen(host, port, error) from error
        self.listening.set()


async def _report(engine: Engine, status: Status, url: str) -> None:
    """Keep the status file's gauges fresh."""
    status.set("serving", url=url)
    sampled, then = engine.tokens_sampled, time.monotonic()
    while True:
        waiting = len(engine.urgent) + len(engine.waiting)
        status.set(running=len(engine.running), waiting=waiting, version=str(engine.version))
        total, now = engine.tokens_sampled, time.monotonic()
        rate = (total - sampled) / (now - then) if now > then else 0.0
        status.set(tokens_sampled=total, tokens_per_second=round(rate, 1))
        sampled, then = total, now
        await asyncio.sleep(GAUGE_INTERVAL)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
