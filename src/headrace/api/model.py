"""Sample from a model, and score texts with it: through a server that is found, or started for as long as needed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from headrace.api.run import Run
from headrace.config.inference import InferenceConfig
from headrace.errors import BadInput
from headrace.inference.client.openai_client import OpenAIClient
from headrace.inference.client.reference import ScoreRoute, prompt_scores
from headrace.launch.server_target import KEY_VAR, find_server, start_server
from headrace.orchestrator.shutdown import run_loop

T = TypeVar("T")
Prompt = str | Sequence[Mapping[str, Any]]
"""A text that is continued as it is, or the messages of a conversation."""
REPLY_TIMEOUT_S = 3600.0


class Completion(NamedTuple):
    """A sampled continuation of a prompt."""

    text: str
    token_ids: list[int]
    logprobs: np.ndarray
    """Of each token at the sampling temperature, over the whole vocabulary."""
    finish_reason: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs


class _Completions(msgspec.Struct):
    choices: list[_Choice]


class Model:
    """A model that is served until `close`, or the end of a `with` block.

    `target` is a model directory or hub name, a run (its running server, else its newest weights) or the URL of a
    server. Keys of [inference] are given by name: `engine="vllm"`.
    """

    def __init__(self, target: str | os.PathLike[str] | Run, **inference: Any) -> None:
        name = str(target.path) if isinstance(target, Run) else os.fspath(target)
        if unknown := [key for key in inference if key.partition(".")[0] not in InferenceConfig.model_fields]:
            raise BadInput("not a key of [inference]", key=unknown[0], value=inference[unknown[0]])
        self._stack = ExitStack()
        server = find_server(name, KEY_VAR)
        if server is not None:
            self._stack.enter_context(closing(server))
        else:
            options = [f"--{key}={value}" for key, value in inference.items()]
            server = self._stack.enter_context(start_server(name, options, lambda: nullcontext(lambda message: None)))
        headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
        self._client = OpenAIClient(server.base_url, server.models()[0].id, timeout=REPLY_TIMEOUT_S, headers=headers)

    def sample(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        **sampling: Any,
    ) -> list[list[Completion]]:
        """Return `n` completions of each prompt. Further fields are those of `/v1/completions`: `seed`, `top_p`, ..."""
        fields = {"n": n, "temperature": temperature, "logprobs": 0, "return_token_ids": True, **sampling}
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        return self._finish([self._complete(prompt, fields) for prompt in _several(prompts)])

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[str | Sequence[int]],
        *,
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Return the logprob of each token of each completion, a text or token ids, after its prompt."""
        pairs = list(zip(_several(prompts), completions, strict=True))
        return self._finish([self._score(prompt, completion, temperature) for prompt, completion in pairs])

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finish(self, requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        async def gather() -> list[T]:
            try:
                return await asyncio.gather(*requests)
            finally:
                await self._client.close()

        return blocking(gather())

    async def _tokenize(self, prompt: Prompt, **options: Any) -> list[int]:
        kind = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        body = {"model": self._client.model, **kind, **options}
        return (await self._client.request("/tokenize", _Tokens, body, at_root=True)).tokens

    async def _complete(self, prompt: Prompt, fields: Mapping[str, Any]) -> list[Completion]:
        body = {"model": self._client.model, "prompt": await self._tokenize(prompt), **fields}
        found = (await self._client.request("/completions", _Completions, body)).choices
        return [
            Completion(each.text, each.token_ids, np.array(each.logprobs.token_logprobs), each.finish_reason)
            for each in found
        ]

    async def _score(self, prompt: Prompt, completion: str | Sequence[int], temperature: float) -> np.ndarray:
        ids = await self._tokenize(prompt)
        text = isinstance(completion, str)
        after = await self._tokenize(completion, add_special_tokens=False) if text else list(completion)  # type: ignore[arg-type]
        scores = await prompt_scores(self._client, ScoreRoute.GENERATE, [*ids, *after], temperature)
        return scores[len(ids) :]


def sample(
    model: str | os.PathLike[str] | Run,
    prompts: Prompt | Sequence[Prompt],
    *,
    n: int = 1,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    **sampling: Any,
) -> list[list[Completion]]:
    """Return `n` completions of each prompt, as `Model.sample`; the model is served for this call."""
    with Model(model) as served:
        return served.sample(prompts, n=n, max_tokens=max_tokens, temperature=temperature, **sampling)


def score(
    model: str | os.PathLike[str] | Run,
    prompts: Prompt | Sequence[Prompt],
    completions: Sequence[str | Sequence[int]],
    *,
    temperature: float = 1.0,
) -> list[np.ndarray]:
    """Return the logprobs of completions after their prompts, as `Model.score`; the model is served for this call."""
    with Model(model) as served:
        return served.score(prompts, completions, temperature=temperature)


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; in a notebook, whose event loop is running, in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_loop(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run_loop, work).result()


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts, also of one."""
    is_one = isinstance(prompts, str) or bool(prompts and isinstance(prompts[0], Mapping))
    return [prompts] if is_one else prompts  # type: ignore[return-value, list-item]
