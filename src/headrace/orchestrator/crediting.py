"""Setup of a run's algorithms, one per training environment, and of the models that they refer to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import numpy as np
from renderers.base import Renderer
from renderers.default import DefaultRenderer

from headrace.algorithms.base import Algorithm, Host, MakeContext
from headrace.algorithms.kl import make_algorithm
from headrace.config.algorithms import AlgorithmConfig
from headrace.config.model import FrozenModelConfig
from headrace.config.orchestrator import OrchestratorConfig
from headrace.errors import BadInput
from headrace.imports import name_of
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import EngineCallError
from headrace.inference.client.reference import FrozenModel, Generated, Reference, ReferenceFailed
from headrace.inference.client.served_model import ServedModel, sampling_keys
from headrace.inference.schema import Health, SamplingParams, Scores
from headrace.rollout.version import Version, past_step
from headrace.text.tokenizer import Tokenizer
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import AlgorithmState
from headrace.transport.weights import WeightStore

log = logging.getLogger(__name__)

MAX_LOADS = 3
"""Attempts to load a version for one score: a server that was restarted has lost it."""


class PolicyReference:
    """The live policy as a reference model: scores with the current weights of its engines."""

    name = "the policy"

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._temperatures: set[float] = set()
        """Temperatures of the scores that algorithms will request."""

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> None:
        """Record the temperature for `check_engines`. The policy has its own vocabulary, so nothing else can differ."""
        self._temperatures.add(temperature)

    def check_engines(self, engines: Sequence[Health]) -> None:
        """Raise `BadInput` if the engines cannot score at the temperatures that algorithms need."""
        other = sorted(self._temperatures - {1.0})
        if other and not all(health.scores_at_any_temperature for health in engines):
            fact = "the policy scores its own samples, and vLLM scores at temperature 1 alone"
            fix = 'Set it to 1, or inference.engine to "embedded".'
            raise BadInput(fact, key="orchestrator.train.sampling.temperature", value=other[0], fix=fix)

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        try:
            scores = await self._score([int(token) for token in token_ids], temperature)
        except EngineCallError as error:
            fact = f"{self.name} did not score a sequence of {len(token_ids)} tokens: {error}"
            raise ReferenceFailed(fact) from error
        return np.array(scores.logprobs)

    async def _score(self, token_ids: list[int], temperature: float) -> Scores:
        # Before queued requests: a whole batch waits for the score.
        return await self._client.score(token_ids, temperature, urgent=True)

    async def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Generated:
        sampling = SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=seed, stop_token_ids=[int(t) for t in stop_token_ids]
        )
        try:
            completion = await self._client.generate([int(token) for token in token_ids], sampling, urgent=True)
        except EngineCallError as error:
            raise ReferenceFailed(f"the policy did not continue {len(token_ids)} tokens: {error}") from error
        return Generated(completion.token_ids, completion.finish_reason)

    async def close(self) -> None:
        """Do nothing: the orchestrator closes the client."""


class PastPolicy(PolicyReference):
    """An earlier version of the policy, on its own server: the initial one, or with `every` the one of `past_step`.

    A score contains the version that computed it, so scores of a restarted server, which has another one, are not used.
    """

    name = "the past policy"

    def __init__(
        self, client: EngineClient, weights: WeightStore, every: int | None = None, max_async_level: int = 0
    ) -> None:
        super().__init__(client)
        self._weights, self._every, self._max_async_level = weights, every, max_async_level
        self._step = 0
        """Step of the version that scores."""
        self._loaded: int | None = None
        """Step of the version that the server has; None if unknown."""
        self._loading = asyncio.Lock()

    def use_batch(self, step: int) -> None:
        """Select the past version that scores the batch of this step."""
        if self._every is not None:
            self._step = past_step(step, self._every, self._max_async_level)

    async def generate(self, *arguments: Any, **options: Any) -> Generated:
        raise ReferenceFailed(f"{self.name} only scores")

    async def _score(self, token_ids: list[int], temperature: float) -> Scores:
        for _ in range(MAX_LOADS):
            await self._load()
            scores = await super()._score(token_ids, temperature)
            if scores.version is not None and scores.version.step == self._step:
                return scores
            self._loaded = None
        raise ReferenceFailed(f"{self.name} scores with {scores.version}, not with the weights after step {self._step}")

    async def _load(self) -> None:
        """Load the selected version into the server, unless it is loaded."""
        async with self._loading:
            step = self._step
            if self._loaded == step:
                return
            if any(Version.parse(health.version).step != step for health in await self._client.health()):
                version = await asyncio.to_thread(self._weights.of_step, step)
                if version is None:
                    fact = f"the weights after step {step}, which score this batch, were deleted"
                    fix = "Restore them, or continue from an earlier checkpoint with --resume STEP."
                    raise BadInput(fact, file=self._weights.directory, fix=fix)
                await self._client.update_weights(self._weights.path(version), version)
                log.info("%s: loaded the weights after step %d", self.name, step)
            self._loaded = step


async def set_up_algorithms(
    config: OrchestratorConfig,
    policy: Reference,
    renderer: Renderer,
    tokenizer: Tokenizer,
    journal: Journal,
    stack: AsyncExitStack,
    notify: Callable[[str], None] = log.warning,
    past: Reference | None = None,
) -> dict[str, Algorithm]:
    """Return an algorithm per training environment, with its state from the journal; the stack closes them."""
    assert config.seq_len is not None
    states = journal.algorithm_states()
    algorithms = {}
    for env in config.train.env:
        algo = config.algo_of(env)
        algorithm = make_algorithm(algo, MakeContext(config.seq_len, make_frozen_model, past))
        check_algorithm(env.name, algo, algorithm, renderer)
        temperature = config.train_temperature(env)
        host = Host(env.name, policy, renderer, tokenizer, config.seq_len, config.seed, temperature, notify)
        await algorithm.start(host)
        stack.push_async_callback(algorithm.stop)
        if env.name in states:
            _load_state(env.name, algorithm, states[env.name])
        algorithms[env.name] = algorithm
    return algorithms


async def open_sources(config: OrchestratorConfig, stack: AsyncExitStack) -> dict[str, ServedModel]:
    """Connect to the frozen models that episodes are sampled from; return them by training environment."""
    assert config.seq_len is not None
    sources = {}
    for env in config.train.env:
        source = config.algo_of(env).sampling_source
        if source is not None:
            served = sources[env.name] = ServedModel(**source.model_dump())
            stack.push_async_callback(served.close)
            sampling = env.sampling.over(config.train.sampling)
            keys = sampling_keys(**sampling.model_dump(exclude_none=True, exclude={"max_tokens"}))
            await served.check_chat(keys, config.seq_len)
    return sources


def check_algorithm(env: str, config: AlgorithmConfig, algorithm: Algorithm, renderer: Renderer) -> None:
    """Check what depends on the model's renderer or on a custom algorithm; raise `BadInput`."""
    if config.NEEDS_ROLES and isinstance(renderer, DefaultRenderer):
        raise BadInput(
            f"{config.type} in environment {env!r} needs the role that wrote each token, which the model's own "
            "chat template does not give",
            key="orchestrator.renderer.name",
            fix="Set it to the model's family (qwen3, llama-3, ...).",
        )
    if algorithm.keeps_state() and type(algorithm).load_state is Algorithm.load_state:
        fact = f"the algorithm of environment {env!r} has state() but no load_state(): a resumed run cannot restore it"
        raise BadInput(fact, key="algo.type", value=name_of(type(algorithm)), fix="Add load_state().")
    if config.sampling_source is not None and algorithm.action_loss_type != "ce":
        loss = algorithm.action_loss_type
        fact = f"{config.type} in environment {env!r} trains with {loss}, which needs the logprobs of the live policy"
        raise BadInput(fact, key="algo.sampling.source", fix='Leave it at "policy".')


def _load_state(env: str, algorithm: Algorithm, saved: AlgorithmState) -> None:
    """Restore the state of an algorithm, unless it was saved by another algorithm."""
    name = name_of(type(algorithm))
    if not algorithm.keeps_state() or saved.algorithm != name:
        log.warning(
            "environment %r: the journal has the state of %s, but the algorithm is %s now: it starts without state",
            env, saved.algorithm, name,
        )  # fmt: skip
    elif (state := msgspec.json.decode(saved.json)) is not None:
        algorithm.load_state(state)


def make_frozen_model(config: FrozenModelConfig) -> FrozenModel:
    return FrozenModel(ServedModel(**config.model_dump()))
