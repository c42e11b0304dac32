"""Sample from a model, score texts with it, and evaluate models on an environment, as `headrace eval` does.

A model is used through a server: a running one, or one that is started for as long as it is needed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from headrace.api.run import Run
from headrace.config.inference import InferenceConfig
from headrace.config.launch import set_variables
from headrace.errors import BadInput
from headrace.inference.client.openai_client import OpenAIClient
from headrace.inference.client.reference import ScoreRoute, prompt_scores
from headrace.launch.own_code import add_code_folders_of
from headrace.launch.saved_config import evaluation_directory, read_run
from headrace.launch.server_target import KEY_VAR, find_server, start_server
from headrace.observe.console import SafeConsole
from headrace.orchestrator.shutdown import run_loop
from headrace.tools.evaluate import evaluation as evaluating
from headrace.tools.evaluate.candidates import Candidate, find_models, run_environment
from headrace.tools.evaluate.episodes import Evaluation
from headrace.tools.evaluate.report import show_progress
from headrace.tools.evaluate.results import ModelResult
from headrace.transport.run_dir import RunDir

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
        return self._gather([self._complete(prompt, fields) for prompt in _as_list(prompts)])

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[str | Sequence[int]],
        *,
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Return the logprob of each token of each completion, a text or token ids, given its prompt."""
        pairs = list(zip(_as_list(prompts), completions, strict=True))

        async def score(prompt: Prompt, completion: str | Sequence[int]) -> np.ndarray:
            ids = await self._tokenize(prompt)
            if isinstance(completion, str):
                completion = await self._tokenize(completion, add_special_tokens=False)
            scores = await prompt_scores(self._client, ScoreRoute.GENERATE, [*ids, *completion], temperature)
            return scores[len(ids) :]

        return self._gather([score(*pair) for pair in pairs])

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _gather(self, requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        async def gather() -> list[T]:
            try:
                return await asyncio.gather(*requests)
            finally:
                await self._client.close()

        return run_blocking(gather())

    async def _tokenize(self, prompt: Prompt, **options: Any) -> list[int]:
        kind = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        body = {"model": self._client.model, **kind, **options}
        return (await self._client.request("/tokenize", _Tokens, body, at_root=True)).tokens

    async def _complete(self, prompt: Prompt, fields: Mapping[str, Any]) -> list[Completion]:
        body = {"model": self._client.model, "prompt": await self._tokenize(prompt), **fields}
        choices = (await self._client.request("/completions", _Completions, body)).choices
        return [Completion(c.text, c.token_ids, np.array(c.logprobs.token_logprobs), c.finish_reason) for c in choices]


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
    """Return the logprobs of completions given their prompts, as `Model.score`; the model is served for this call."""
    with Model(model) as served:
        return served.score(prompts, completions, temperature=temperature)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result; in another thread if an event loop is running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_loop(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run_loop, work).result()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts as a list; one prompt becomes a list of one."""
    is_one = isinstance(prompts, str) or bool(prompts and isinstance(prompts[0], Mapping))
    return [prompts] if is_one else prompts  # type: ignore[return-value, list-item]


ModelTarget = str | os.PathLike[str] | Run


def evaluate(
    models: ModelTarget | Sequence[ModelTarget],
    env: str = "",
    *,
    env_args: Mapping[str, Any] | None = None,
    output: Path | None = None,
    permanent: bool = False,
    temperature: float = 0.0,
    max_tokens: int | None = None,
    **settings: Any,
) -> list[ModelResult]:
    """Return the scores, lengths and failures of models, runs, checkpoints or servers on an environment.

    Without `env` it is the environment of the run. `permanent`: the permanent checkpoints of a run, not its final
    model. Further settings are those of `Evaluation`: `samples`, `num_examples`, `seed`, ... An evaluation that was
    stopped continues from its `output`.
    """
    several = [models] if isinstance(models, str | os.PathLike | Run) else models
    names = [str(model.path) if isinstance(model, Run) else os.fspath(model) for model in several]
    sampling = {"temperature": temperature, **({} if max_tokens is None else {"max_tokens": max_tokens})}
    requested = Evaluation(output or Path(), env, dict(env_args or {}), sampling, **settings)
    evaluation, candidates, _ = complete_evaluation(requested, names, permanent=permanent)
    with show_progress(SafeConsole(stderr=True)) as progress:
        outcomes = run_blocking(evaluating.evaluate(evaluation, candidates, progress))
    return [outcome.result for outcome in outcomes]


def complete_evaluation(
    evaluation: Evaluation, models: Sequence[str], *, permanent: bool
) -> tuple[Evaluation, list[Candidate], str]:
    """Fill in environment and output from the runs among `models`; return also the models and a name for the output."""
    candidates = find_models(models, permanent=permanent)
    subject = evaluation.env
    if not evaluation.env:
        own = run_environment(candidates)
        evaluation = evaluation._replace(env=own.id, args=own.args | evaluation.args)
        subject = own.name
        print(f"on {own.name}, as {own.run} has it", file=sys.stderr)
    runs = list(dict.fromkeys(candidate.run for candidate in candidates if candidate.run is not None))
    for run in runs:
        add_code_folders_of(RunDir(run))  # the environment may be the run's own code
    if runs:
        set_variables(read_run(runs[0]).launch)  # locations of its data, above all HF_HOME
    if evaluation.output == Path():
        evaluation = evaluation._replace(output=evaluation_directory(runs[0] if runs else None, subject))
    return evaluation, candidates, subject
