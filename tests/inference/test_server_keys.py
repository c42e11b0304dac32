"""Who may call what, and on which address a server may listen without keys."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.inference.keys import Forbidden, Keys, KeySource, Unauthorized, is_loopback
from headrace.inference.server.main import serve
from tests.inference.serving import backend_of, chat_of, served
from tests.refusals import refused

CLIENT = ["/v1/models", "/metrics"]
POSTED = ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/tokenize", "/detokenize"]
ADMIN = ["/pause", "/resume", "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]


def keys_from(environment: dict[str, str], host: str = "127.0.0.1", *, in_run: bool = False) -> Keys:
    config = InferenceConfig(host=host, api_key_var="A", admin_key_var="B")
    return KeySource(config, environment, in_run=in_run).read()


@pytest.fixture
def keys() -> Keys:
    return Keys(("client-key",), ("admin-key",))


@pytest_asyncio.fixture
async def http(model: Any, model_directory: Path, keys: Keys) -> AsyncIterator[aiohttp.ClientSession]:
    backend = await backend_of(model, model_directory)
    async with served(backend, chat_of(model_directory), keys) as url, aiohttp.ClientSession(url) as session:
        yield session


async def status_of(http: aiohttp.ClientSession, path: str, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    method = "GET" if path in (*CLIENT, "/health") else "POST"
    async with http.request(method, path, headers=headers, data=b"{}") as answer:
        assert (answer.status == 401) == ("WWW-Authenticate" in answer.headers)
        return answer.status


async def test_clients_show_either_key(http: aiohttp.ClientSession) -> None:
    for path in CLIENT + POSTED:
        well = 200 if path in CLIENT else 400  # the body is empty
        asked = [await status_of(http, path, key) for key in (None, "wrong", "client-key", "admin-key", "")]
        assert asked == [401, 401, well, well, 401], path


async def test_admins_show_theirs(http: aiohttp.ClientSession) -> None:
    for path in ADMIN:
        well = 200 if path in ("/pause", "/resume") else 400
        asked = [await status_of(http, path, key) for key in (None, "client-key", "admin-key")]
        assert asked == [401, 401, well], path


async def test_health_is_everyones(http: aiohttp.ClientSession) -> None:
    assert await status_of(http, "/health", None) == 200


def test_without_an_admin_key_all_admin_calls_are_forbidden() -> None:
    for shown in (None, "Bearer ", "Bearer None"):
        with pytest.raises(Forbidden, match="admin_key_var"):
            Keys().check(shown, admin=True)
    Keys().check(None, admin=False)


@pytest.mark.parametrize(
    "shown", [None, "", "Bearer", "Basic client-key", "client-key", "Bearer client-key2", "Bearer é"]
)
def test_a_key_is_shown_in_one_way(keys: Keys, shown: str | None) -> None:
    with pytest.raises(Unauthorized):
        keys.check(shown, admin=False)
    keys.check("bearer  client-key ", admin=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_address_that_others_reach_needs_a_key(host: str, model_directory: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    with refused(ConfigError, key="inference.host", value=host):
        serve(InferenceConfig(model={"name": str(model_directory)}, host=host), status=None, run=None)
    assert keys_from({"A": "key"}, host) == Keys(("key",))


def test_this_machine_needs_none() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert keys_from({}, "localhost") == Keys()


def test_in_a_run_there_is_always_an_admin_key_and_never_the_same() -> None:
    made = [keys_from({}, in_run=True).admin for _ in range(2)]
    assert all(made) and made[0] != made[1]
    assert keys_from({"B": "mine"}, in_run=True).admin == ("mine",)


@pytest.mark.parametrize("key", ["", "a b", "é", "a\n"])
def test_what_cannot_be_shown_is_no_key(key: str) -> None:
    with refused(ConfigError, key="A", value=None):
        keys_from({"A": key})
