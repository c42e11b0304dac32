"""The servers that answer for a model: those that run already, or some that are started for it and end with it."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from headrace.errors import BadInput, Failure
from headrace.launch.private_server import PrivateServer
from headrace.launch.server_target import base_url, key_in
from headrace.tools.evaluate.engines import Team
from headrace.tools.evaluate.models import Candidate

POLL = 0.1


class Served(NamedTuple):
    """Where a model answers, with which key, and the directory with its tokenizer; None: whatever the server names."""

    urls: list[str]
    key: str | None
    directory: str | None
    chat_urls: Sequence[str] = ()
    """The same addresses as OpenAI's interface has them; none where the servers are surely ours."""
    key_var: str = ""
    """The variable that has the key."""


class ExportFailed(Failure):
    """A checkpoint could not be written as a model. The message has what `headrace export` said."""


@asynccontextmanager
async def serving(
    candidate: Candidate, options: Sequence[str], key_var: str, log: Path, team: Team
) -> AsyncIterator[Served]:
    """Serve a model on the engines of a team with these options of `headrace serve`, whose logs stay.

    An endpoint takes no team; `key_var` holds its key.
    """
    if candidate.kind == "endpoint":
        chat_urls = [base_url(url) for url in candidate.source.split(",")]
        yield Served(engine_urls(candidate), key_in(key_var), None, chat_urls, key_var)
    elif candidate.kind == "model":
        _check_final(candidate)
        async with _started(candidate.source, options, log, team) as served:
            yield served
    else:
        with tempfile.TemporaryDirectory(prefix="model-", dir=log.parent) as directory:
            await _export(candidate.source, directory)
            async with _started(directory, options, log, team) as served:
                yield served


def engine_urls(endpoint: Candidate) -> list[str]:
    return [base_url(url).removesuffix("/v1") for url in endpoint.source.split(",")]


def _check_final(candidate: Candidate) -> None:
    if candidate.run is not None and not Path(candidate.source).is_dir():
        raise BadInput(
            "the run has no final model yet",
            key="CHECKPOINT",
            value=str(candidate.run),
            fix="Finish the run, or take --checkpoints permanent.",
        )


async def _export(checkpoint: str, directory: str) -> None:
    """In a process of its own: it takes torch, and as much memory as the model."""
    argv = [sys.executable, "-m", "headrace", "export", checkpoint, directory]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise ExportFailed(f"{checkpoint} cannot be exported: {said.decode(errors='replace').strip()[-2000:]}")


@asynccontextmanager
async def _started(model: str, options: Sequence[str], log: Path, team: Team) -> AsyncIterator[Served]:
    """Start a server on each engine of the team; they share one key. The second logs to `serve-2.log`."""
    key = secrets.token_urlsafe()
    servers: list[PrivateServer] = []
    try:
        for number, env in enumerate(team, 1):
            own_log = log if number == 1 else log.with_stem(f"{log.stem}-{number}")
            servers.append(PrivateServer(model, options, own_log, env, key))
        while None in (addresses := [server.address() for server in servers]):
            await asyncio.sleep(POLL)
        yield Served([address.removesuffix("/v1") for address in addresses if address], key, model)
    finally:
        await asyncio.gather(*(asyncio.to_thread(server.close) for server in servers))
