"""Live updates: what was appended to the metrics, and changes of status and files, as server-sent events.

Each connection follows the files of one run, or the list of all runs, and reads only what was appended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse

from headrace.observe.metrics import Tail
from headrace.tools.view.runs import RunFolder, ViewedRun, list_runs, saved_files, status_of

log = logging.getLogger(__name__)

POLL_S = 1.0
FOLDER_POLL_S = 3.0
"""Looking at hundreds of runs takes longer."""
KEEP_ALIVE_S = 15.0
VOLATILE = ("silent_s", "waiting_s", "problem_s", "gauges")
"""Entries of a process that change with every reading; they alone are no reason for an event."""
Events = list[tuple[str, Any, int | None]]
"""Name, content and identifier of each event."""


class RunEvents:
    """The changes of one run since the last call, from a place of its metrics on."""

    def __init__(self, run: ViewedRun, offset: int | None) -> None:
        self._run = run
        size = run.dir.metrics.stat().st_size if run.dir.metrics.is_file() else 0
        self._tail = Tail(run.dir.metrics, size if offset is None else min(offset, size))
        self._status: Any = None
        self._files: Any = None

    def __call__(self) -> Events:
        events: Events = []
        size = self._run.dir.metrics.stat().st_size if self._run.dir.metrics.is_file() else 0
        if size < self._tail.offset:  # a resume from an earlier checkpoint has replaced the file
            self._tail.offset = size
        if records := self._tail.read():
            events.append(("metrics", {"records": records, "offset": self._tail.offset}, self._tail.offset))
        status = status_of(self._run)
        lasting = {
            **status,
            "problem": bool(status["problem"]),  # its text has seconds, as a finding has
            "doctor": [(finding.kind, finding.severity, finding.process) for finding in status["doctor"]],
            "processes": [{n: v for n, v in p.items() if n not in VOLATILE} for p in status["processes"]],
        }
        if lasting != self._status:
            self._status = lasting
            events.append(("status", status, None))
        if (files := saved_files(self._run)) != self._files:
            if self._files is not None:
                events.append(("files", files, None))
            self._files = files
        return events


class FolderEvents:
    """The rows of runs that changed since the last call."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._rows = {row.id: row for row in list_runs(folder)["runs"]}

    def __call__(self) -> Events:
        rows = {row.id: row for row in list_runs(self._folder)["runs"]}
        changed = [row for id, row in rows.items() if row != self._rows.get(id)]
        self._rows = rows
        return [("runs", {"runs": changed}, None)] if changed else []


def stream(request: Request, read: Callable[[], Events], poll_s: float = POLL_S) -> StreamingResponse:
    return StreamingResponse(_follow(request, read, poll_s), media_type="text/event-stream")


async def _follow(request: Request, read: Callable[[], Events], poll_s: float) -> AsyncIterator[bytes]:
    yield b": connected\n\n"
    sent_at = time.monotonic()
    while not await request.is_disconnected():
        try:
            events = await run_in_threadpool(read)
        except OSError as error:  # a file was removed while it was read
            log.warning("%s is read again: %s", request.url.path, error)
            events = []
        for name, content, number in events:
            sent_at = time.monotonic()
            yield as_event(name, content, number)
        if time.monotonic() - sent_at > KEEP_ALIVE_S:
            sent_at = time.monotonic()
            yield b": alive\n\n"
        await asyncio.sleep(poll_s)


def as_event(name: str, content: Any, number: int | None) -> bytes:
    """Return an event as it is sent; JSON has no line breaks, so the data is one line."""
    identifier = b"" if number is None else b"id: %d\n" % number
    return identifier + b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))
