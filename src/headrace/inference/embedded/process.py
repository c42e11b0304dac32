"""The process of the embedded engine: loads the model, then serves the HTTP server that started it.

The server and the engine have an interpreter each, so that neither HTTP nor JSON delays a step. The process ends with
the server, whose end closes their socket.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time

from headrace.config.inference import InferenceConfig
from headrace.errors import BadInput, Failure
from headrace.inference.embedded import messages as m
from headrace.machine import frozen_gc, frozen_imports
from headrace.observe.status import setup_logging
from headrace.text.tokenizer import Tokenizer
from headrace.transport.lock import POLL_S, DeviceLock

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Longest time for which another thread keeps the interpreter from the engine's: a step takes a few milliseconds."""


def main() -> None:
    """Run the engine of the server at the other end of a socket; the argument is its file descriptor."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    setup_logging()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server gets them, too, and ends this process in order
    with frozen_imports():  # while the server imports its own libraries
        import headrace.inference.embedded.loading  # noqa: F401
    frames = m.Frames(m.TO_ENGINE)
    start: m.ToEngine | None = None
    while start is None:
        content = connection.recv(1 << 16)
        if not content:
            return
        start = next(frames.feed(content), None)
    assert isinstance(start, m.Start)
    threading.Thread(target=_end_with_server, args=(connection,), name="lifeline", daemon=True).start()
    try:
        _serve(start, connection)
    except Exception as error:
        refusal: Exception = error
        if isinstance(error, OSError):
            refusal = BadInput(f"the model cannot be loaded: {error}", key="model", value=start.directory)
        elif not isinstance(error, Failure):
            log.exception("the engine cannot start")
            refusal = Failure(f"the engine cannot start: {type(error).__name__}: {error}")
        connection.sendall(m.frame(m.CannotStart(m.Error.of(refusal))))
    logging.shutdown()
    os._exit(0)  # without waiting for calls that are blocked, for example on a file that cannot be read


def _end_with_server(connection: socket.socket) -> None:
    """End this process if the server ends before its first request; from then on the service notices."""
    if not connection.recv(1, socket.MSG_PEEK):
        os._exit(1)


def _serve(start: m.Start, connection: socket.socket) -> None:
    from headrace.inference.embedded.loading import load_engine
    from headrace.inference.embedded.service import EngineService

    lock = None
    if start.shared is not None and start.shared.lock_directory is not None:
        # Held while the model is loaded, so that free memory is measured while the trainer does not compute.
        lock = DeviceLock(start.shared.lock_directory, trainer=False)
        if not lock.try_acquire():
            connection.sendall(m.frame(m.Starting("waiting for the trainer's step to end")))
        while not lock.try_acquire():
            time.sleep(POLL_S)
    connection.sendall(m.frame(m.Starting("loading model")))
    config = InferenceConfig.model_validate_json(start.config)
    engine = load_engine(config, start.directory, Tokenizer(start.directory), start.shared)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with frozen_gc():
        EngineService(engine, connection, lock, config.http.admin_timeout).run()


if __name__ == "__main__":
    main()
