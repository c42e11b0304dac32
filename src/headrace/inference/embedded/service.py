"""The engine's end of the connection to the HTTP server: takes requests and calls, and returns what the engine does.

The engine's thread sends all messages of a step at once. It blocks if the server does not read, and so samples no
faster than the server can return. Calls, which may wait for files or for the engine, have threads of their own.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from concurrent.futures import Future

from headrace.inference.backend import EngineState, GenerationResult
from headrace.inference.embedded import messages as m
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.weights.reading import READ_TIMEOUT_S
from headrace.transport.lock import DeviceLock

READ_BYTES = 1 << 18
SEND_BUFFER_BYTES = 1 << 22
"""Results that the engine's thread can send without waiting for the server."""
STATE_INTERVAL_S = 0.05
"""Shortest time between two snapshots while the engine steps."""
HEARTBEAT_S = 1.0
"""Longest time between two snapshots, while the process is alive."""


class EngineService:
    """An engine whose requests come from a socket, until `Close` or the end of the connection."""

    def __init__(
        self,
        engine: Engine,
        connection: socket.socket,
        lock: DeviceLock | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._connection = connection
        self._requests: dict[int, Request] = {}
        self._unsent: deque[m.FromEngine] = deque()
        self._sending = threading.Lock()
        self._is_connected = True
        self._last_state: EngineState | None = None
        self._state_sent_at = 0.0
        self._thread = EngineThread(engine, lock, read_timeout_s)
        self._thread.after_step = self._after_step

    def run(self) -> None:
        """Serve until the connection ends; then stop the engine."""
        self._send(m.Ready(self._thread.engine.max_model_len, self._thread.engine.vocab_size, self._thread.state()))
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()
        frames = m.Frames(m.TO_ENGINE)
        try:
            while content := self._connection.recv(READ_BYTES):
                for message in frames.feed(content):
                    if isinstance(message, m.Close):
                        return
                    self._handle(message)
        finally:
            self._thread.stop()
            self._flush()
            with self._sending:
                self._is_connected = False
                self._connection.close()

    def _handle(self, message: m.ToEngine) -> None:
        match message:
            case m.Submit():
                self._submit(message)
            case m.Call():
                # Each call has a thread, so that none waits for another, for example one that reads weights.
                threading.Thread(target=self._answer, args=(message,), name="engine-call", daemon=True).start()
            case m.Follow(number):
                if (request := self._requests.get(number)) is not None:
                    self._follow(number, request)
            case m.Cancel(number):
                if (request := self._requests.get(number)) is not None:
                    self._thread.cancel(request)

    def _submit(self, message: m.Submit) -> None:
        """Submit a request to the engine, and have its outcome sent."""
        try:
            options = {"urgent": message.urgent, "adapter": message.adapter, "is_checked": True}  # by the server
            request = self._thread.submit(message.token_ids, message.params, message.cache_salt, **options)
        except Exception as error:  # the server refuses most, but the engine may have changed since
            self._send(m.Failed(message.number, m.Error.of(error)))
            return
        number = message.number

        def queue_outcome(future: Future[GenerationResult]) -> None:
            self._requests.pop(number, None)
            error = future.exception()
            outcome = m.Finished(number, future.result()) if error is None else m.Failed(number, m.Error.of(error))
            self._unsent.append(outcome)

        self._requests[number] = request
        request.future.add_done_callback(queue_outcome)
        if request.future.done():  # before the callback was added: then no step sends the result
            self._flush()

    def _follow(self, number: int, request: Request) -> None:
        """Send the tokens of a request from now on as they are sampled."""
        sent = 0

        def send_new() -> None:
            nonlocal sent
            chunk = request.sampled_since(sent)
            sent += len(chunk.token_ids)
            self._unsent.append(m.Tokens(number, chunk))

        request.on_tokens = send_new

    def _answer(self, call: m.Call) -> None:
        """Make a call, and send its result or its error."""
        arguments = (each for each in (call.name, call.directory, call.version) if each is not None)
        try:
            answer = m.Answer(call.number, value=getattr(self._thread, call.method)(*arguments))
        except Exception as error:
            answer = m.Answer(call.number, error=m.Error.of(error))
        self._send(m.State(self._thread.state()), answer)

    def _after_step(self, idle: bool) -> None:
        """Send what the last step produced; on the engine's thread."""
        now = time.monotonic()
        if idle or now - self._state_sent_at > STATE_INTERVAL_S:
            self._state_sent_at = now
            state = self._thread.state()
            if state != self._last_state:
                self._last_state = state
                self._unsent.append(m.State(state))
        self._flush()

    def _send_heartbeats(self) -> None:
        while self._is_connected:
            time.sleep(HEARTBEAT_S)
            self._send(m.State(self._thread.state()))

    def _send(self, *messages: m.FromEngine) -> None:
        self._unsent.extend(messages)
        self._flush()

    def _flush(self) -> None:
        """Send all queued messages as one frame."""
        with self._sending:
            queued = [self._unsent.popleft() for _ in range(len(self._unsent))]
            if not (queued and self._is_connected):
                return
            try:
                self._connection.sendall(m.frame(*queued))
            except OSError:  # the server has ended, which `run` sees, too
                self._is_connected = False
