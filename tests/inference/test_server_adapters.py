"""Adapters beside the model, over HTTP: loaded, listed, asked for by name, unloaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.transport.adapter import write_adapter
from tests.inference.plain_forward import plain_logprobs
from tests.inference.serving import ADMIN_KEY, backend_of, chat_of, served
from tests.inference.test_adapter_updates import adapted

IDS = [*range(40, 60)]


async def test_a_request_that_names_an_adapter_is_scored_by_it(
    make_model: Callable[[int], Any], model_directory: Path, tmp_path: Path
) -> None:
    trained, adapter = adapted(make_model, 1)
    write_adapter(tmp_path, adapter)
    backend = await backend_of(make_model(0), model_directory, base=model_directory)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        served(backend, chat_of(model_directory)) as url,
        aiohttp.ClientSession(url, headers=headers) as http,
    ):

        async def scores(model: str) -> list[float]:
            body = {"model": model, "prompt": IDS, "echo": True, "max_tokens": 0, "logprobs": 0}
            async with http.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                [choice] = (await answer.json())["choices"]
                return list(choice["logprobs"]["token_logprobs"][1:])

        async def status(path: str, **body: str) -> int:
            async with http.post(path, json=body) as answer:
                return answer.status

        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        assert await status(load, lora_name="tuned", lora_path=str(tmp_path)) == 200
        assert await scores("tuned") == pytest.approx(plain_logprobs(trained, IDS).tolist(), abs=1e-4)
        assert await scores("tiny") == pytest.approx(plain_logprobs(make_model(0), IDS).tolist(), abs=1e-5)
        async with http.get("/v1/models") as answer:
            listed = [(entry["id"], entry["parent"]) for entry in (await answer.json())["data"]]
        assert listed == [("tiny", None), ("tuned", "tiny")]
        assert await status(load, lora_name="tiny", lora_path=str(tmp_path)) == 400
        assert await status(load, lora_name="other", lora_path=str(tmp_path / "nowhere")) == 400
        assert await status(unload, lora_name="tuned") == 200
        assert await status(unload, lora_name="tuned") == 404
        assert await status("/tokenize", model="tuned", prompt="a") == 404
