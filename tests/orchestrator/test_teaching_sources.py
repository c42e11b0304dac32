"""The models that play episodes, opened before a run begins."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from headrace.errors import BadInput
from headrace.inference.client.served_model import HELLO, ServedModel
from headrace.orchestrator.crediting import open_sources
from tests.config.run_files import run
from tests.inference.openai_stand_in import OpenAIStandIn, error


async def opened(server: OpenAIStandIn, **env: Any) -> dict[str, ServedModel]:
    """The sources of a run whose second environment is played by a teacher."""
    teacher = {"name": "large", "base_url": server.url, "retry_for": 0}
    envs = [{"id": "a"}, {"id": "b", "algo": {"type": "sft", "teacher": teacher}, **env}]
    train = {"env": envs, "sampling": {"temperature": 0.7, "top_k": 20, "max_tokens": 50}}
    config = run(orchestrator={"train": train}).orchestrator
    async with AsyncExitStack() as stack:
        return await open_sources(config, stack)


async def test_a_teacher_is_asked_for_a_word_as_the_run_will_ask():
    async with OpenAIStandIn() as server:
        assert list(await opened(server, sampling={"top_p": 0.9})) == ["b"]
        sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
        assert server.asked == [{"model": "large", "messages": HELLO, "max_tokens": 1, **sampling}]


async def test_a_teacher_that_takes_no_such_sampling_is_refused_before_the_run_begins():
    def respond(body: dict[str, Any]) -> web.Response | str:
        return error(400, "Unknown parameter: top_k") if "top_k" in body else "yes"

    async with OpenAIStandIn(respond) as server:
        with pytest.raises(BadInput, match="Unknown parameter: top_k"):
            await opened(server)
        await opened(server, sampling={"top_k": -1})
