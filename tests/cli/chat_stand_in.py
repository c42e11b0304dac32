"""A server that speaks OpenAI's interface and streams configured replies, on a real socket in its own thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG_UP_WAIT = 10.0


class ChatStandIn:
    """`events` are the deltas of its replies; `refusal` is what it answers instead, a status and a message."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"content": "Hel"}, {"content": "lo."}]
        self.escapes = True
        """Whether what is not ASCII is escaped."""
        self.finish: str | None = "stop"
        self.error: str | None = None
        """Sent in the middle of a reply, after the events."""
        self.usage = {"prompt_tokens": 20, "completion_tokens": 2}
        self.refusal: tuple[int, str] | None = None
        self.goes_on = False
        """Whether it keeps sending until the client disconnects."""
        self.counted: int | None = None
        self.health: dict[str, Any] | None = None
        self.models = [{"id": "small", "max_model_len": 32}, {"id": "large"}]
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.hung_up = threading.Event()
        self.url = ""

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": self.models}
        if path == "/health" and self.health is not None:
            return 200, self.health
        return 404, {"error": {"message": "no such route"}}

    def stream(self) -> Iterator[str]:
        for delta in self.events:
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield json.dumps({"choices": [choice]}, ensure_ascii=self.escapes)
        while self.goes_on:
            yield json.dumps({"choices": [{"index": 0, "delta": {"content": " more"}, "finish_reason": None}]})
        if self.error is not None:
            yield json.dumps({"error": {"message": self.error, "type": "engine_error"}})
            return
        if self.finish is not None:
            yield json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish}]})
            yield json.dumps({"choices": [], "usage": self.usage})
            yield "[DONE]"


@contextmanager
def chat_stand_in() -> Iterator[ChatStandIn]:
    stand_in = ChatStandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stand_in.keys.append(self.headers.get("Authorization"))
            self._answer(*stand_in.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize" and stand_in.counted is not None:
                self._answer(200, {"count": stand_in.counted, "tokens": []})
            elif self.path != "/v1/chat/completions":
                self._answer(404, {"error": {"message": "no such route"}})
            elif stand_in.refusal is not None:
                status, message = stand_in.refusal
                self._answer(status, {"error": {"message": message}})
            else:
                stand_in.asked.append(body)
                self._stream()

        def _stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for event in stand_in.stream():
                    self.wfile.write(f"data: {event}\n\n".encode())
            except OSError:
                stand_in.hung_up.set()

        def _answer(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.goes_on = False
        server.shutdown()
        server.server_close()
