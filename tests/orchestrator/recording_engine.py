"""An engine that is asked in this process and remembers everything: for tests where a socket adds nothing."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple, cast

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import Completion, SamplingParams, WeightVersionSpan

Answer = Callable[[list[int], SamplingParams], tuple[list[int], str]]
"""From a prompt to the tokens of a completion and why it ended."""


class Exchange(NamedTuple):
    """A request to the engine and its response. `prompt` is a copy, so it cannot change later."""

    prompt: list[int]
    sampling: SamplingParams
    cache_salt: str | None
    session: str | None
    completion: Completion


class RecordingEngine:
    """Returns scripted responses. No two sampled tokens have the same logprob, so each can be identified."""

    def __init__(self, answer: Answer, seed: int = 0) -> None:
        self.exchanges: list[Exchange] = []
        self.joined: list[str] = []
        self._answer = answer
        self._rng = Random(seed)
        self._sampled = 0

    @property
    def client(self) -> EngineClient:
        return cast(EngineClient, self)

    def join(self, session: str) -> None:
        self.joined.append(session)

    def leave(self, session: str) -> None:
        self.joined.remove(session)

    async def generate(
        self, token_ids: list[int], sampling: SamplingParams, cache_salt: str | None = None, session: str | None = None
    ) -> Completion:
        prompt = list(token_ids)
        ids, reason = self._answer(token_ids, sampling)
        logprobs = [-(self._sampled + n) / 4096 for n in range(1, len(ids) + 1)]  # float32 holds them exactly
        self._sampled += len(ids)
        cut = self._rng.randint(0, len(ids))
        spans = [WeightVersionSpan("0-3", 0, cut), WeightVersionSpan("1-4", cut, len(ids))]
        truncated = [value / 2 for value in logprobs] if self._rng.random() < 0.2 else None
        completion = Completion(list(ids), logprobs, spans, reason, truncated)
        self.exchanges.append(Exchange(prompt, sampling, cache_salt, session, completion))
        return completion


def scripted(*answers: list[int], reason: str = "stop") -> Answer:
    """One answer after another."""
    left = iter(answers)

    def answer(prompt: list[int], sampling: SamplingParams) -> tuple[list[int], str]:
        return next(left), reason

    return answer
