"""Models that only pretend to score: any sequence at once, or as a test has them fail."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.algorithms.base import Algorithm, Host, Survivor
from headrace.algorithms.opsd import Opsd, OpsdConfig
from headrace.algorithms.rlcsd import Rlcsd, RlcsdConfig
from headrace.inference.client.reference import Generated, ReferenceFailed
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Message, Rollout, Task, Turn
from tests.text.families import load

SEQ_LEN = 1000
MODEL = load("qwen3-all")
TASK = Task("env", {"question": "?"}, "task-0")


def pretended_logprobs(token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """One per token, made of all tokens so far; 0.0 for the first."""
    state, found = 0, []
    for token in token_ids:
        state = (state * 31 + int(token) + 1) % 1009
        found.append(-state / 1009 / temperature - 0.01)
    return np.array([0.0, *found[1:]])


class Teacher:
    """Answers what `score` says, with a pause; fails where `fails` says so."""

    name = "the teacher"

    def __init__(
        self,
        score: Callable[[Sequence[int], float], Any] = pretended_logprobs,
        fails: Callable[[Sequence[int]], bool] = lambda token_ids: False,
    ) -> None:
        self._score = score
        self._fails = fails
        self.asked: list[tuple[list[int], float]] = []
        self.under_way = self.most_under_way = 0
        self.checked: tuple[Any, int, float] | None = None
        self.room: int | None = None
        self.closed = False

    async def check(self, tokenizer: Any, seq_len: int, temperature: float = 1.0) -> int | None:
        self.checked = (tokenizer, seq_len, temperature)
        return self.room

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        self.asked.append((list(token_ids), temperature))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.work(token_ids)
        finally:
            self.under_way -= 1
        return np.asarray(self._score(token_ids, temperature))

    async def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Generated:
        await self.score(token_ids, temperature)
        return Generated([7] * max_tokens, "length")

    async def work(self, token_ids: Sequence[int]) -> None:
        await asyncio.sleep(0)
        if self._fails(token_ids):
            raise ReferenceFailed(f"the teacher did not score {len(token_ids)} tokens")

    async def close(self) -> None:
        self.closed = True


def host_of(policy: Teacher, seed: int = 0) -> Host:
    return Host("env", policy, MODEL.renderer, MODEL.tokenizer, SEQ_LEN, seed)


async def set_up(algorithm: Any, policy: Teacher | None = None, seed: int = 0) -> Any:
    """The algorithm, ready for its hooks."""
    assert isinstance(algorithm, Algorithm)
    await algorithm.start(host_of(policy or Teacher(), seed))
    return algorithm


def opsd_of(teacher: Teacher | None = None, **keys: Any) -> Opsd:
    return Opsd(OpsdConfig.model_validate(keys), teacher)


def rlcsd_of(teacher: Teacher | None = None, credit: Any = None, hint_filter: Any = None, **keys: Any) -> Rlcsd:
    return Rlcsd(RlcsdConfig.model_validate(keys), teacher, credit, hint_filter)


def hint_ids(text: str) -> list[int]:
    """A message by the user, as the model's chat format has it."""
    return MODEL.encode(f"<|im_start|>user\n{text}<|im_end|>\n") if text else []


def rollout_of(
    *completions: Sequence[int],
    reward: float = 0.0,
    said: str | Sequence[Message] = "something",
    group: str = "group-0",
    agent: str = "policy",
    temperature: float = 1.0,
    one_sample: bool = False,
) -> Rollout:
    """A sample per completion, or one of all of them with an observed token between two."""
    turns: list[Turn] = []
    for number, completion in enumerate(completions):
        prompt = [100 + number]
        if one_sample and turns:
            prompt = [*turns[-1].prompt_ids.tolist(), *turns[-1].completion_ids.tolist(), 90]
        count = len(completion)
        turns.append(Turn(prompt, list(completion), [-1.0] * count, [0] * count, temperature))
    messages = [{"role": "assistant", "content": said}] if isinstance(said, str) else list(said)
    return Rollout(
        env="env",
        task_key=TASK.key,
        group_id=group,
        draw_id=4,
        agent=agent,
        reward=reward,
        messages=messages,
        turns=turns,
        samples=merge_turns(turns),
    )


def survivors(rollouts: Sequence[Rollout], task: Task = TASK) -> list[Survivor]:
    return [Survivor(rollout, task) for rollout in rollouts]
