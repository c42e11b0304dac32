"""Admin calls that wait for a file: they end, and neither later calls nor the end of the server waits for them."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import EngineCallError
from headrace.inference.embedded.backend import EmbeddedBackend
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from tests.faults.injection import stopped
from tests.inference.conftest import ServerProcess
from tests.inference.serving import ADMIN_KEY, blocked, chat_of, connect, engine_of, served
from tests.transport.network_mount import missing, mounted

V1, V2 = Version(0, 1), Version(0, 2)
START = 90.0
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files that block need leases")
Publish = Callable[[Any, Version], Path]


@pytest_asyncio.fixture
async def backend(model: Any, model_directory: Path) -> EmbeddedBackend:
    backend: EmbeddedBackend = await connect(engine_of(model, model_directory), read_timeout_s=2.0)
    return backend


@pytest_asyncio.fixture
async def http(backend: EmbeddedBackend, model_directory: Path) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with served(backend, chat_of(model_directory)) as url, aiohttp.ClientSession(url, headers=headers) as session:
        yield session


async def update(http: aiohttp.ClientSession, path: Path, version: Version) -> tuple[int, str]:
    body = {"path": str(path), "incarnation": version.incarnation, "step": version.step}
    async with http.post("/update_weights", json=body) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("name", ["model.safetensors", "COMPLETE.json"])
async def test_a_fifo_is_refused_by_its_name(
    http: aiohttp.ClientSession, model: Any, publish: Publish, name: str
) -> None:
    path = publish(model, V1)
    (path / name).unlink()
    os.mkfifo(path / name)
    status, message = await update(http, path, V1)
    assert status == 400 and str(path) in message and name in message
    assert (await update(http, publish(model, V2), V2))[0] == 200


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_fifo_in_an_adapter_is_refused_by_its_name(
    http: aiohttp.ClientSession, tmp_path: Path, name: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": []}'
    )
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    async with http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(tmp_path)}) as answer:
        assert answer.status == 400 and str(tmp_path / name) in await answer.text()


@pytest.mark.parametrize("name", ["model.safetensors", "COMPLETE.json"])
async def test_a_file_that_cannot_be_read_blocks_nothing_else(
    http: aiohttp.ClientSession, model: Any, publish: Publish, name: str
) -> None:
    path, good = publish(model, V1), publish(model, V2)
    with blocked(path / name):
        stuck = [asyncio.create_task(update(http, path, V1)) for _ in range(6)]
        for call in ("/pause", "/resume"):
            async with http.post(call) as answer:
                assert answer.status == 200
        assert not any(task.done() for task in stuck)
        for status, message in await asyncio.gather(*stuck):  # at their time limit
            assert status == 502 and str(path) in message and "inference.http.admin_timeout" in message
        assert (await update(http, good, V2))[0] == 200
        async with http.post("/inference/v1/generate", json={"token_ids": [5]}) as answer:
            assert answer.status == 200


ALL = ("update", "silent", "head", "body", "stream")


def open_stuck(url: str, kinds: tuple[str, ...]) -> list[asyncio.Task[Any]]:
    """Connections that are silent, that stop in a head or in a large body, and that stream without reading."""
    host, port = url.removeprefix("http://").split(":")
    body = b'{"prompt": "a", "max_tokens": 100, "ignore_eos": true, "stream": true, "n": 4, "return_token_ids": true}'
    post = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: ".encode()
    sent = {
        "silent": b"",
        "head": b"GET /hea",
        "body": post + b"30000000\r\n\r\n" + b" " * 2**21,
        "stream": post + b"%d\r\n\r\n" % len(body) + body,
    }

    async def hold(content: bytes) -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(content)
        await asyncio.sleep(START)

    return [asyncio.create_task(hold(sent[kind])) for kind in kinds if kind in sent for _ in range(12)]


@pytest.mark.parametrize("kinds", [ALL, *(pytest.param((kind,), marks=pytest.mark.full) for kind in ALL)])
async def test_sigterm_ends_a_server_with_stuck_clients_and_a_stuck_update(
    model_directory: Path, model: Any, tmp_path: Path, publish: Publish, kinds: tuple[str, ...]
) -> None:
    server = ServerProcess(tmp_path / "run", model_directory)
    run, process = server.run, server.process
    client = EngineClient(run.endpoints, retry_for=0)
    path = publish(model, V1)
    try:
        await client.wait_ready(START)
        with blocked(path / "model.safetensors"):
            (url,) = await client.health_by_url()
            stuck = open_stuck(url, kinds)
            if "update" in kinds:
                stuck.append(asyncio.create_task(client.update_weights(path, V1)))
            await client.generate([5], SamplingParams(max_tokens=100, ignore_eos=True))
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 40) == 0  # the file would block for 45 s
            assert not list(run.endpoints.iterdir())
            for task in stuck:
                task.cancel()
    finally:
        process.kill()
        await client.close()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
async def test_a_mount_whose_server_hangs_blocks_neither_admin_calls_nor_the_end(
    model_directory: Path, model: Any, tmp_path: Path, publish: Publish
) -> None:
    server = ServerProcess(tmp_path / "run", model_directory, admin_timeout=3.0)
    client = EngineClient(server.run.endpoints, retry_for=0)
    good, folder = publish(model, V2), tmp_path / "folder"
    shutil.copytree(publish(model, V1), folder / "v1")
    try:
        await client.wait_ready(START)
        with mounted(folder, tmp_path / "mount") as mount_server, stopped(mount_server):
            path = tmp_path / "mount" / "v1"
            stuck = asyncio.create_task(client.update_weights(path, V1))
            await client.pause()
            await client.resume()
            with pytest.raises(EngineCallError, match="admin_timeout"):
                await stuck
            await client.update_weights(good, V2)
            await client.generate([5], SamplingParams(max_tokens=100, ignore_eos=True))
            stuck = asyncio.create_task(client.update_weights(path, V1))
            await asyncio.sleep(1)  # until it reads
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait, 60) == 0
            stuck.cancel()
    finally:
        server.process.kill()
        await client.close()
