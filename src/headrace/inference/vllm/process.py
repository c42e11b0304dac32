"""vLLM's server as a child process: its room, its start, its log, its end.

It listens on a socket file in a directory that only its user can enter, so it needs no key and takes no port. It gets a
process group of its own, and the read end of a pipe whose write end we hold: when we are gone, however that happened,
it ends itself and everything it has started.
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
LAST_LINES = 40
"""Lines of its log that an error message shows."""
LOOK = 0.2
"""Seconds between two looks at whether it is up."""
GRACE = 10.0
"""Seconds to stop in order, before it is killed."""
CHUNK = 1 << 16
LONGEST_ROOT = 70
"""Bytes of a path under which a socket's own path is not too long for the system."""


class VllmFailed(Failure):
    """vLLM did not start. The message has the end of its log."""


class Room:
    """A directory for one child: its socket, and Headrace where its interpreter finds it, with nothing else of ours."""

    def __init__(self) -> None:
        root = tempfile.gettempdir()
        self.directory = Path(  # which nobody else may enter
            tempfile.mkdtemp(prefix="headrace-vllm-", dir=root if len(os.fsencode(root)) < LONGEST_ROOT else "/tmp")
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
    """The child, from its start to its end. Made by `start`, inside the event loop that will use it."""

    def __init__(self, process: asyncio.subprocess.Process, room: Room, lifeline: int) -> None:
        self._process = process
        self._room = room
        self._lifeline = lifeline
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._reading = asyncio.create_task(self._read_log())
        self._stopping: asyncio.Task[None] | None = None
        self.pid = process.pid
        self.url = room.url

    @classmethod
    async def start(cls, room: Room, python: Path, arguments: Sequence[str], env: Mapping[str, str]) -> VllmProcess:
        """Run vLLM's server in an interpreter that has it. The arguments are the server's."""
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(str(python), "-m", CHILD, str(read_end), str(room.directory), *arguments),
                env=env,
                pass_fds=(read_end,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            os.close(write_end)
            room.remove()
            raise VllmFailed(f"inference.vllm.python, {python}, cannot be run: {error.strerror}") from error
        finally:
            os.close(read_end)
        return cls(process, room, write_end)

    async def ready(self, http: HttpClient, timeout: float) -> None:
        """Wait until it answers. Raises `VllmFailed`, and it is then gone."""
        deadline = asyncio.get_running_loop().time() + timeout
        ended = asyncio.create_task(self.ended())
        try:
            while not await self._answers(http):
                if ended.done():
                    raise VllmFailed(ended.result())
                if asyncio.get_running_loop().time() > deadline:
                    raise VllmFailed(
                        f"vLLM did not answer within inference.vllm.start_timeout = {timeout:g} s. {self.last_words()}"
                    )
                await asyncio.wait({ended}, timeout=LOOK)
        finally:
            ended.cancel()

    async def _answers(self, http: HttpClient) -> bool:
        try:
            return (await http.request("GET", self.url, "/health", None, 5.0)).status == 200
        except (TimeoutError, ServerUnreachable):
            return False

    async def ended(self) -> str:
        """Wait for its end; returns how it came to that."""
        status = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # its own children may hold on to the log
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._reading)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        return f"vLLM {how}. {self.last_words()}"

    def last_words(self) -> str:
        if not self._lines:
            return "It wrote nothing to its log."
        return "The end of its log:\n" + "\n".join(self._lines)

    async def stop(self) -> None:
        """End it, and whatever it has started. Several may ask for it."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._process.returncode is None:
            self._signal(signal.SIGTERM, group=False)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE):
                    await self._process.wait()
        self._signal(signal.SIGKILL, group=True)
        await self._process.wait()
        self._reading.cancel()
        os.close(self._lifeline)
        self._room.remove()

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so with EPERM
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    async def _read_log(self) -> None:
        """Every line of it into our own log. It must be read, whatever it says, or the child would stand still."""
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                if "Route: /" not in text:  # it lists all it has
                    self._lines.append(text)
                    log.info("vllm: %s", text)
