"""vLLM's server as a child process: its directory, its start, its log, its end.

It listens on a Unix socket in a directory that only its user can enter, so it needs no key and no port. It has its own
process group and the read end of a pipe whose write end we hold: when our process ends, for any reason, it kills itself
and everything that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import headrace
from headrace.errors import Failure
from headrace.inference.client.http import UNIX, HttpClient, ServerUnreachable

log = logging.getLogger(__name__)

CHILD = "headrace.inference.vllm.child"
MAX_LOG_LINES = 40
"""Lines of its log in an error message."""
READY_POLL_S = 0.2
HEALTH_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 10.0
"""For a clean shutdown, before it is killed."""
READ_BYTES = 1 << 16
MAX_ROOT_BYTES = 70
"""Longest path of a temporary directory in which the path of a socket is short enough for the system."""


class VllmFailed(Failure):
    """vLLM did not start. The message has the end of its log."""


class ChildDirectory:
    """A temporary directory of one child: its socket, and an import path that contains only Headrace."""

    def __init__(self) -> None:
        root = tempfile.gettempdir()
        self.directory = Path(  # with access for this user only
            tempfile.mkdtemp(prefix="headrace-vllm-", dir=root if len(os.fsencode(root)) < MAX_ROOT_BYTES else "/tmp")
        )
        self.socket = self.directory / "socket"
        self.import_path = self.directory / "import"
        self.import_path.mkdir()
        (self.import_path / "headrace").symlink_to(Path(headrace.__file__).parent)

    @property
    def url(self) -> str:
        return f"{UNIX}{self.socket}"

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


class VllmProcess:
    """The child process. Create it with `start`, in the event loop that will use it."""

    def __init__(self, process: asyncio.subprocess.Process, directory: ChildDirectory, lifeline: int) -> None:
        self._process = process
        self._directory = directory
        self._lifeline = lifeline
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._reading = asyncio.create_task(self._read_log())
        self._stopping: asyncio.Task[None] | None = None
        self.pid = process.pid
        self.url = directory.url

    @classmethod
    async def start(
        cls, directory: ChildDirectory, python: Path, arguments: Sequence[str], env: Mapping[str, str]
    ) -> VllmProcess:
        """Run vLLM's server in the interpreter `python` with these arguments."""
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(str(python), "-m", CHILD, str(read_end), str(directory.directory), *arguments),
                env=env,
                pass_fds=(read_end,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            os.close(write_end)
            directory.remove()
            raise VllmFailed(f"inference.vllm.python = {python}: cannot be run: {error.strerror}") from error
        finally:
            os.close(read_end)
        return cls(process, directory, write_end)

    async def ready(self, http: HttpClient, timeout: float) -> None:
        """Wait until it responds. Raises `VllmFailed` if it ends before, or not in time."""
        deadline = asyncio.get_running_loop().time() + timeout
        ended = asyncio.create_task(self.ended())
        try:
            while True:
                with contextlib.suppress(TimeoutError, ServerUnreachable):
                    if (await http.request("GET", self.url, "/health", None, HEALTH_TIMEOUT_S)).status == 200:
                        return
                if ended.done():
                    raise VllmFailed(ended.result())
                if asyncio.get_running_loop().time() > deadline:
                    raise VllmFailed(
                        f"vLLM did not respond within inference.vllm.start_timeout = {timeout:g} s. {self.log_tail()}"
                    )
                await asyncio.wait({ended}, timeout=READY_POLL_S)
        finally:
            ended.cancel()

    async def ended(self) -> str:
        """Wait for its end and return a description of it."""
        status = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # its children may keep the log open
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._reading)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        return f"vLLM {how}. {self.log_tail()}"

    def log_tail(self) -> str:
        if not self._lines:
            return "It wrote nothing to its log."
        return "The end of its log:\n" + "\n".join(self._lines)

    async def stop(self) -> None:
        """Stop it and everything that it has started. May be called several times."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # already gone; macOS raises EPERM
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        self._reading.cancel()
        os.close(self._lifeline)
        self._directory.remove()

    async def _read_log(self) -> None:
        """Copy its output to our log. Unread output would block the child."""
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                if "Route: /" not in text:  # the list of all routes
                    self._lines.append(text)
                    log.info("vllm: %s", text)
