"""Certificates, and keys that change while a server runs."""

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.config.base import ConfigError
from headrace.config.inference import HttpConfig, InferenceConfig
from headrace.inference.client import engine_client
from headrace.inference.client.chat_stream import ChatClient
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import EngineRejected
from headrace.inference.client.openai_client import OpenAIUnreachable
from headrace.inference.keys import Keys, KeySource
from headrace.inference.schema import SamplingParams
from headrace.inference.server import main
from headrace.inference.server.app import App
from headrace.inference.server.http_server import bind, check_tls, url_of
from tests.inference.serving import backend_of, chat_of, served
from tests.refusals import refused

ONE = SamplingParams(max_tokens=1)


def write_certificate(directory: Path) -> HttpConfig:
    """Write a certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headrace")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = HttpConfig(tls_certificate=directory / "certificate.pem", tls_key=directory / "key.pem")
    assert paths.tls_certificate is not None and paths.tls_key is not None
    paths.tls_certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    paths.tls_key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return paths


async def test_a_server_with_a_certificate_speaks_https_only(
    model: Any, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = write_certificate(tmp_path)
    check_tls(limits)
    backend = await backend_of(model, model_directory)
    trusting = ssl.create_default_context(cafile=str(limits.tls_certificate))
    async with served(backend, chat_of(model_directory), limits=limits) as url, aiohttp.ClientSession() as http:
        https = url.replace("http:", "https:")
        async with http.post(f"{https}/tokenize", json={"prompt": "a"}, ssl=trusting) as answer:
            assert (await answer.json())["count"] == 1
        with pytest.raises(OpenAIUnreachable):
            await asyncio.to_thread(ChatClient(f"{https}/v1").models)
        monkeypatch.setenv("SSL_CERT_FILE", str(limits.tls_certificate))
        assert await asyncio.to_thread(ChatClient(f"{https}/v1").models)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(f"{https}/health")
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"{url}/health")
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener, "https").startswith("https://127.0.0.1:")


def test_a_certificate_that_cannot_be_used_is_refused_before_the_start(tmp_path: Path) -> None:
    paths = write_certificate(tmp_path)
    for wrong in (tmp_path / "none.pem", paths.tls_key):
        with refused(ConfigError, key="inference.http.tls_certificate", value=wrong):
            check_tls(HttpConfig(tls_certificate=wrong, tls_key=paths.tls_key))


def write_keys(path: Path, api: list[str], admin: list[str]) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(f"api = {api}\nadmin = {admin}\n")
    draft.replace(path)


@pytest.mark.parametrize(
    "content", ["api = 5", "api = ['a b']", "api = ['']", "keys = []", "api = [", "api = ['secret'\n\n", "\xff"]
)
def test_a_file_that_has_no_keys_is_refused_without_showing_any(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(content, encoding="latin-1")
    config = InferenceConfig(http=HttpConfig(keys_file=path))
    with pytest.raises(ConfigError, match=r"keys\.toml") as error:
        KeySource(config, {}, in_run=False).read()
    assert "secret" not in str(error.value)


def test_the_file_replaces_the_variables_and_is_needed_on_other_addresses(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    config = InferenceConfig(host="0.0.0.0", http=HttpConfig(keys_file=path))
    source = KeySource(config, {"HEADRACE_API_KEY": "unused"}, in_run=False)
    write_keys(path, [], [])
    assert source.has_changed() and not source.has_changed()
    with refused(ConfigError, key="inference.host", value="0.0.0.0"):
        source.read()
    write_keys(path, ["new", "old"], ["admin"])
    assert source.has_changed()
    assert source.read() == Keys(("new", "old"), ("admin",))


class Rotating:
    """A server of a run whose keys are in a file, and the address that it publishes."""

    def __init__(self, root: Path) -> None:
        self.file, self.endpoints = root / "keys.toml", root / "endpoints"
        self.rotate(["old"], ["old-admin"])

    def rotate(self, api: list[str], admin: list[str]) -> None:
        write_keys(self.file, api, admin)


@pytest.fixture
async def rotating(
    model: Any, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rotating]:
    monkeypatch.setattr(main, "KEYS_POLL_S", 0.01)
    rotating = Rotating(tmp_path)
    config = InferenceConfig(http=HttpConfig(keys_file=rotating.file))
    source = KeySource(config, {}, in_run=True)
    with bind("127.0.0.1", 0) as listener:
        endpoint = rotating.endpoints / "inference.json"
        server = main._EngineServer(config, listener, source, None, endpoint, None, nullcontext)
        app = App(await backend_of(model, model_directory), chat_of(model_directory), source.read())
        stop = asyncio.Event()
        serving = asyncio.create_task(server._listen(app, stop))
        yield rotating
        stop.set()
        await serving


async def test_keys_are_rotated_while_clients_call(rotating: Rotating, tmp_path: Path) -> None:
    run = EngineClient(rotating.endpoints, retry_for=30)
    await run.wait_ready(30)
    [url] = await run.health_by_url()
    mine = tmp_path / "mine.toml"
    write_keys(mine, ["old"], ["old-admin"])
    clients = [run, EngineClient([url], keys_file=mine), EngineClient([url], api_key="old", admin_key="old-admin")]
    for client in clients:
        await client.generate([5], ONE)

    async def call() -> None:
        while not done.is_set():
            await asyncio.gather(*[client.generate([5], ONE) for client in clients[:2]], run.pause(), run.resume())

    done = asyncio.Event()
    calling = asyncio.create_task(call())
    rotating.rotate(["new", "old"], ["new-admin", "old-admin"])
    await accepted(url, "new")
    await clients[2].generate([5], ONE)  # the old key is valid until it is removed
    write_keys(mine, ["new"], ["new-admin"])
    rotating.rotate(["new"], ["new-admin"])
    while await accepts(url, "old"):
        await asyncio.sleep(0.01)
    with pytest.raises(EngineRejected):
        await clients[2].generate([5], ONE)
    await clients[1].pause()
    await clients[1].resume()
    done.set()
    await calling  # without an error
    for client in clients:
        await client.close()


async def test_a_key_that_changes_right_after_the_client_read_it_is_read_again(
    rotating: Rotating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "ENDPOINTS_MAX_AGE_S", 600.0)
    run = EngineClient(rotating.endpoints, retry_for=30)
    await run.wait_ready(30)
    [url] = await run.health_by_url()
    rotating.rotate(["new"], ["new-admin"])
    await accepted(url, "new")
    await run.generate([5], ONE)
    await run.close()


async def test_a_withdrawn_address_is_not_published_with_new_keys(rotating: Rotating) -> None:
    run = EngineClient(rotating.endpoints, retry_for=30)
    await run.wait_ready(30)
    [url] = await run.health_by_url()
    (rotating.endpoints / "inference.json").unlink()  # by the launcher: the server drains
    rotating.rotate(["new"], ["new-admin"])
    await accepted(url, "new")
    await asyncio.sleep(0.05)
    assert not list(rotating.endpoints.iterdir())
    await run.close()


async def accepts(url: str, key: str) -> bool:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}) as answer,
    ):
        return answer.status == 200


async def accepted(url: str, key: str) -> None:
    while not await accepts(url, key):
        await asyncio.sleep(0.01)


async def test_a_damaged_file_leaves_the_keys_as_they_were(rotating: Rotating) -> None:
    run = EngineClient(rotating.endpoints, retry_for=30)
    await run.wait_ready(30)
    [url] = await run.health_by_url()
    rotating.file.write_text("api = [")
    await asyncio.sleep(0.2)  # some polls
    assert await accepts(url, "old")
    rotating.rotate(["new"], [])
    await accepted(url, "new")
    await run.pause()  # a run has an admin key in any case
    await run.close()
