"""`headrace serve`: starts an engine, serves it over HTTP, and shuts down cleanly."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.errors import AGAIN
from headrace.inference.backend import Backend, EngineError, EngineStopped
from headrace.inference.embedded.backend import EngineProcess, start_embedded
from headrace.inference.keys import Keys, KeySource
from headrace.inference.memory import ColocatedTrainer
from headrace.inference.server.app import App
from headrace.inference.server.chat import Chat
from headrace.inference.server.http_server import HttpServer, bind, check_tls, url_of
from headrace.inference.weights.reading import WeightsError, WeightsUnreachable
from headrace.machine import frozen_gc, raise_open_file_limit, return_large_blocks
from headrace.observe.status import THE_GPU, Status
from headrace.rollout.version import Version
from headrace.text.hub import model_directory
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.transport.endpoint import (
    PAST_SERVER,
    Endpoint,
    new_endpoint_path,
    withdraw_endpoint,
    withdraw_endpoints,
    write_endpoint,
)
from headrace.transport.files import in_daemon_thread
from headrace.transport.lock import POLL_S, DeviceLock
from headrace.transport.run_dir import RunDir
from headrace.transport.weights_link import is_linked

T = TypeVar("T")
Export = Callable[[Callable[[], Iterable[str]]], AbstractContextManager[Any]]

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 1.0
KEYS_POLL_S = 1.0
FAILURE_NOTICE_S = 2.0
"""How long a server whose engine has died reports that, before it exits to be restarted."""


def serve(
    config: InferenceConfig,
    *,
    status: Status | None,
    run: RunDir | None,
    announce: Callable[[str], None] | None = None,
    shared: ColocatedTrainer | None = None,
    engine: EngineProcess | None = None,
    export: Export = nullcontext,
) -> None:
    """Serve until SIGTERM or SIGINT; exits with `AGAIN` if the engine dies.

    `announce` gets the URL once the server listens. Without a `status` the server is not one of the run's: it starts
    with the run's newest weights and does not publish its address. `shared` describes the device, if the run's trainer
    uses it, too. `engine` is the process of the embedded engine, if it was started before. `export` serves metrics
    elsewhere, too.
    """
    if config.model.name is None:
        raise ConfigError(
            "required, but not set", key="inference.model.name", fix="Set a directory or a name on the hub."
        )
    endpoint = None
    if run is not None and status is not None:
        withdraw_endpoints(run.endpoints, status.current.process)  # left behind by a server that was killed
        endpoint = new_endpoint_path(run.endpoints, status.current.process)
    keys = KeySource(config, os.environ, in_run=endpoint is not None)
    keys.read()  # raises if there are none, before the model is loaded
    check_tls(config.http)
    raise_open_file_limit()
    return_large_blocks()
    with bind(config.host, config.port) as listener:
        server = _EngineServer(config, listener, keys, status, endpoint, announce, export)
        failure = asyncio.run(server.serve(config.model.name, run, shared, engine))
        if failure is not None:
            if status is not None:
                status.set_problem(failure)
            raise SystemExit(AGAIN)


def make_chat(config: InferenceConfig, name: str, directory: Path) -> Chat:
    """Load the tokenizer and the chat format of a model."""
    tokenizer = Tokenizer(directory)
    renderer = make_renderer(directory, tokenizer, **config.renderer.model_dump())
    path = Path(config.served_name or name)
    return Chat(path.resolve().name if path.is_dir() else str(path), tokenizer, renderer)


async def start_engine(
    config: InferenceConfig,
    directory: Path,
    shared: ColocatedTrainer | None,
    on_progress: Callable[[str], None],
    engine: EngineProcess | None,
) -> Backend:
    """Start the configured engine in a process of its own; `on_progress` gets what it does until then."""
    if config.engine == "embedded":
        return await start_embedded(config, directory, shared, on_progress, engine)
    from headrace.inference.vllm.start import start_vllm

    lock = None
    if shared is not None and shared.lock_directory is not None:
        # Held while the model is loaded, so that free memory is measured while the trainer does not compute.
        lock = DeviceLock(shared.lock_directory, trainer=False)
        if not lock.try_acquire():
            on_progress("waiting for the trainer's step to end")
        while not lock.try_acquire():
            await asyncio.sleep(POLL_S)
    on_progress("loading model")
    tokenizer = Tokenizer(directory)
    return await start_vllm(config, directory, eos_token_id=tokenizer.eos_token_id, decode=tokenizer.decode, lock=lock)


@dataclass(frozen=True)
class _EngineServer:
    """One server process: its address, and who learns that it serves."""

    config: InferenceConfig
    listener: socket.socket
    keys: KeySource
    status: Status | None
    endpoint: Path | None
    announce: Callable[[str], None] | None
    export: Export

    async def serve(
        self, name: str, run: RunDir | None, shared: ColocatedTrainer | None, engine: EngineProcess | None
    ) -> str | None:
        """Start the engine with the model `name` and serve it; return the reason if it died."""
        directory = model_directory(name)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)

        backend: Backend | None = None
        try:
            started = await _run_unless(stop, self._start(name, directory, shared, engine))
            if started is None:
                return None
            backend, chat = started
            if run is not None and (self.status is None or self.status.current.process != PAST_SERVER):
                await _run_unless(stop, _load_newest_weights(backend, run))
            max_body = round(self.config.max_body_mb * 2**20)
            root = self.config.served_name or name
            app = App(backend, chat, self.keys.read(), root=root, max_body=max_body, limits=self.config.http)
        except BaseException as error:
            failure = str(error) if isinstance(error, EngineStopped) else None
            if backend is not None:
                failure = backend.state().failure or failure
                await backend.close()
            if failure is None or not isinstance(error, EngineError):
                raise
            log.error("the engine died: %s", failure)
            return failure
        if stop.is_set():
            await backend.close()
            return None
        with frozen_gc(), self.export(app.metric_lines):
            return await self._listen(app, stop)

    async def _start(
        self, name: str, directory: Path, shared: ColocatedTrainer | None, engine: EngineProcess | None
    ) -> tuple[Backend, Chat]:
        """Start the engine, and load the tokenizer meanwhile."""

        def show(activity: str) -> None:
            if self.status is not None:
                self.status.set(activity)

        starting = asyncio.create_task(start_engine(self.config, directory, shared, show, engine))
        try:
            # In a thread that does not delay the end: the files may be on a mount that does not respond.
            chat = await asyncio.wrap_future(in_daemon_thread(partial(make_chat, self.config, name, directory)))
            return await starting, chat
        except BaseException:
            starting.cancel()
            await asyncio.wait({starting})
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().close()
            raise

    async def _listen(self, app: App, stop: asyncio.Event) -> str | None:
        """Serve until `stop`, or until the engine dies: then return the reason. Closes the engine."""
        server = HttpServer(app)
        url = url_of(self.listener, "http" if self.config.http.tls_certificate is None else "https")
        serving = asyncio.create_task(server.serve(sockets=[self.listener]))
        died = asyncio.create_task(app.backend.failure())
        helpers: list[asyncio.Task[Any]] = [died]
        try:
            await _first_of(server.listening, serving)
            log.info("serving %s on %s", app.model_name, url)
            self._publish(url, app.keys)
            helpers.append(asyncio.create_task(self._follow_keys(app, url)))
            if self.announce is not None:
                self.announce(url)
            if self.status is not None:
                helpers.append(asyncio.create_task(_keep_status(app.backend, self.status, url)))
            failure: str | None = await _first_of(stop, died, serving)
            if failure is not None:
                log.error("the engine died: %s", failure)
                await _first_of(stop, asyncio.create_task(asyncio.sleep(FAILURE_NOTICE_S)), serving)
            log.info("stopping")
            return failure
        finally:
            if self.endpoint is not None:
                withdraw_endpoint(self.endpoint)
            for task in helpers:
                task.cancel()
            await app.backend.close()  # ends requests in flight before connections close
            server.should_exit = True
            await serving

    def _publish(self, url: str, keys: Keys) -> None:
        """Write the endpoint of a run's server, with its newest keys."""
        if self.endpoint is not None:
            api_key, admin_key = (next(iter(each), None) for each in (keys.api, keys.admin))
            write_endpoint(self.endpoint, Endpoint(url, os.getpid(), api_key=api_key, admin_key=admin_key))

    async def _follow_keys(self, app: App, url: str) -> None:
        """Read the keys again when their file changes. An invalid file changes nothing."""
        while True:
            await asyncio.sleep(KEYS_POLL_S)
            if not self.keys.has_changed():
                continue
            try:
                app.keys = self.keys.read()
            except ConfigError as error:
                log.error("the keys stay as they were: %s", error)
            else:
                log.info("the keys have changed: %d of clients, %d of admins", len(app.keys.api), len(app.keys.admin))
                if self.endpoint is not None and self.endpoint.exists():  # else it was withdrawn: the server drains
                    self._publish(url, app.keys)


async def _load_newest_weights(backend: Backend, run: RunDir) -> None:
    """Load the run's newest weights, so that a restarted server does not sample from the initial model.

    The trainer may publish more meanwhile: each attempt takes the newest version that was not tried.
    """
    tried: set[Version] = set()
    unreachable: Version | None = None
    while left := [version for version in run.weights.published() if version not in tried]:
        version = left[-1]
        tried.add(version)
        path = run.weights.path(version)
        if unreachable is not None and version < unreachable and is_linked(path):
            continue  # the same source as the newer one: each attempt may take a minute
        try:
            await backend.update_weights(path, version)
        except WeightsError as error:  # damaged by a power loss, for example
            log.warning("weights %s cannot be loaded: %s", version, error)
            if isinstance(error, WeightsUnreachable):
                unreachable = version
        else:
            log.info("starting at version %s", version)
            return


async def _run_unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of the work, or cancel it and return None if `stop` is set before."""
    task = asyncio.create_task(work)
    result: T | None = await _first_of(stop, task)
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    return result


async def _first_of(event: asyncio.Event, *tasks: asyncio.Task[Any]) -> Any:
    """Wait for an event or for the first task to end; return that task's result or raise its error."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return next((task.result() for task in tasks if task.done()), None)


async def _keep_status(backend: Backend, status: Status, url: str) -> None:
    """Update the status file every second."""
    status.set("serving", url=url)
    sampled, then = backend.state().tokens_sampled, time.monotonic()
    wait: int | None = None
    unsaturated_at = then
    while True:
        state, now = backend.state(), time.monotonic()
        if state.waiting <= state.running or state.waits_for_trainer:
            unsaturated_at = now
        if state.waits_for_trainer and wait is None:
            wait = status.begin_wait(f"{THE_GPU} from the trainer")
        elif not state.waits_for_trainer and wait is not None:
            status.end_wait(wait)
            wait = None
        rate = (state.tokens_sampled - sampled) / (now - then) if now > then else 0.0
        status.set(running=state.running, waiting=state.waiting, version=str(state.version))
        status.set(tokens_sampled=state.tokens_sampled, tokens_per_second=round(rate, 1))
        status.set(kv_usage=round(state.kv_usage, 3), saturated_s=round(now - unsaturated_at, 1))
        if state.hand_overs:
            status.set(hand_overs=state.hand_overs, cache_releases=state.cache_releases)
        sampled, then = state.tokens_sampled, now
        await asyncio.sleep(STATUS_INTERVAL_S)
