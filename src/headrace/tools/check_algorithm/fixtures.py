"""Test data of algorithms: a byte-level tokenizer, the Qwen3 chat format, fake reference models, and groups.

Groups are plain ones from a seed, and edge cases that occur in long runs.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace
from renderers.base import Renderer

from headrace.algorithms.base import Host
from headrace.algorithms.custom import ImportedAlgoConfig
from headrace.config.algorithms import ALGORITHMS, AlgorithmConfig
from headrace.config.base import Tree
from headrace.config.orchestrator import OrchestratorConfig
from headrace.inference.client.reference import Generated, Reference, ReferenceFailed
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import ROLES, Message, Rollout, Task, Turn
from headrace.runfile.reading import validate
from headrace.text.prompt import Prompt, PromptRenderer
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer, byte_tokenizer

SEQ_LEN = 1000
END = "<|im_end|>"
TEACHER = {"name": "fake", "base_url": "http://fake.invalid/v1"}
"""Teacher of algorithms that require one. No request is sent to it."""
HUGE = 1e6
"""As large as the score of a game."""
HUGE_REWARDS = "huge rewards"
TWINS = "seven alike"
"""The case whose members have the same completion and the same reward."""
VERSION = 3
"""The weights version of the policy that sampled all tokens."""
TOOL = ROLES.index("tool")
ANSWER = {"question": "What is 6 times 7?", "answer": "42", "demonstration": "6 times 7 is 42."}
"""Task info that every case has."""
T = TypeVar("T")


class Fixtures(msgspec.Struct):
    tokenizer: Tokenizer
    renderer: Renderer
    prompts: PromptRenderer

    def host(self, policy: Reference) -> Host:
        return Host("env", policy, self.renderer, self.tokenizer, SEQ_LEN)


def make_fixtures() -> Fixtures:
    """Use the chat format of Qwen3, which attributes each token to a role."""
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save(str(Path(folder) / "tokenizer.json"))
        tokenizer = Tokenizer(folder)
        renderer = make_renderer(folder, tokenizer, "qwen3", enable_thinking=False, thinking_retention="all")
    return Fixtures(tokenizer, renderer, PromptRenderer(renderer))


def algorithm_config(section: Tree, where: str) -> AlgorithmConfig:
    """Validate an `algo` section by itself; raises `ConfigError` with all problems and their keys."""
    has_model = any(key in section for key in ("teacher", "model", "sampling"))
    declared = ALGORITHMS.chosen_section(section)  # validation reports an unknown type
    needs_teacher = declared is not None and declared.NEEDS_TEACHER and not has_model
    tree = {"algo": {**section, "teacher": TEACHER} if needs_teacher else section, "seq_len": SEQ_LEN}
    algo = validate(OrchestratorConfig, tree, where)[0].algo
    if isinstance(algo, ImportedAlgoConfig) and algo.teacher is None and algo.model_role:
        return algorithm_config({**section, "teacher": TEACHER}, where)
    return algo


def context_logprobs(ids: np.ndarray) -> np.ndarray:
    """Return logprobs that depend on the token id and, for two tokens in three, on all tokens before it."""
    before = np.cumsum(ids * (np.arange(len(ids)) % 7 + 1)) % 997
    logprobs = np.where(ids % 3 == 0, -0.5 - (ids % 5) / 10, -0.01 - before / 997)
    logprobs[:1] = 0.0
    return logprobs


class FakeModel:
    """A reference model whose logprobs are a pure function of the token ids."""

    name = "a fake model"

    def __init__(self, logprobs: Callable[[np.ndarray], np.ndarray] = context_logprobs) -> None:
        self.requests = 0
        self._logprobs = logprobs

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> None:
        """Accept everything."""

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        self.requests += 1
        await asyncio.sleep(0)  # yield to other tasks, as a real request does
        return self._logprobs(np.asarray(token_ids, np.int64))

    async def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Generated:
        """Return the prompt's last tokens in reverse order."""
        self.requests += 1
        await asyncio.sleep(0)
        return Generated([int(token) for token in token_ids[: -1 - max_tokens : -1]], "length")

    async def close(self) -> None:
        """There is nothing to close."""


class FailingModel(FakeModel):
    """A model whose every `period`-th request fails."""

    name = "a failing model"

    def __init__(self, period: int) -> None:
        super().__init__()
        self._period = period

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        return await self._answer(token_ids, super().score(token_ids, temperature))

    async def generate(self, token_ids: Sequence[int], *args: Any, **options: Any) -> Generated:
        return await self._answer(token_ids, super().generate(token_ids, *args, **options))

    async def _answer(self, token_ids: Sequence[int], request: Awaitable[T]) -> T:
        fails = (self.requests + 1) % self._period == 0  # counted before other tasks send requests
        answer = await request
        if fails:
            raise ReferenceFailed(f"{self.name} got a sequence of {len(token_ids)} tokens")
        return answer


class Case(msgspec.Struct, frozen=True):
    """One finished group without credit."""

    name: str
    task: Task
    rollouts: list[Rollout]
    plain: bool = False
    """Whether every member has a completion and an ordinary reward."""

    def shifted(self, by: float) -> Case:
        """Return the case with `by` added to every reward."""
        return replace(self, rollouts=[replace(each, **_rewards(each.reward + by)) for each in self.rollouts])

    def mirrored(self) -> Case:
        """Return another group of the same task with the rewards' order reversed: the best becomes the worst."""
        rewards = [rollout.reward for rollout in self.rollouts]
        ends, group = min(rewards) + max(rewards), f"{self.rollouts[0].group_id}, mirrored"
        rollouts = [replace(each, group_id=group, **_rewards(ends - each.reward)) for each in self.rollouts]
        return replace(self, rollouts=rollouts)

    def with_task_suffix(self, suffix: str) -> Case:
        """Return the same group under another task key."""
        key = f"{self.task.key}, {suffix}"
        rollouts = [replace(rollout, task_key=key) for rollout in self.rollouts]
        return replace(self, task=replace(self.task, key=key), rollouts=rollouts)

    def members(self, indices: Sequence[int]) -> Case:
        """Return the case with only these rollouts, in this order."""
        return replace(self, rollouts=[self.rollouts[index] for index in indices])

    def copied(self) -> Case:
        return replace(self, task=deepcopy(self.task), rollouts=deepcopy(self.rollouts))


def make_cases(fixtures: Fixtures, data: dict[str, Any], seed: int = 0) -> list[Case]:
    """Return all cases; the info of their tasks is `ANSWER` and `data`."""
    author = Author(fixtures, seed)
    rng = random.Random(seed)

    def case(name: str, rollouts: list[Rollout], *, plain: bool = False, agents: int = 1) -> Case:
        task = Task("env", {**ANSWER, **data}, f"task-{name}")
        for index, rollout in enumerate(rollouts):
            rollout.env, rollout.task_key, rollout.group_id = task.env, task.key, f"group-{name}"
            rollout.episode = index // agents
        return Case(name, task, rollouts, plain)

    def answers(name: str, rewards: Sequence[float], *, plain: bool = False) -> Case:
        return case(name, [author.answer(reward) for reward in rewards], plain=plain)

    return [
        answers("right and wrong", [1, 0, 0, 1, 0, 1, 1, 0], plain=True),
        answers("partial rewards", [rng.random() for _ in range(6)], plain=True),
        answers("rewards of any sign", [rng.gauss(0, 1) for _ in range(5)], plain=True),
        answers("one right", [0, 0, 1, 0], plain=True),
        answers("one wrong", [1, 1, 0, 1], plain=True),
        case("tools and users", [author.talk(reward) for reward in (1, 0.5, 0, 0.2)], plain=True),
        case("several samples", [author.rewritten(reward) for reward in (1, 0, 0.5)], plain=True),
        case(
            "two agents", [author.answer(reward, agent=a) for reward in (1, 0, 0.5) for a in "ab"], plain=True, agents=2
        ),
        case("one against many", [author.answer(rng.random(), agent=a) for a in "abbb" * 3], plain=True, agents=4),
        answers("one member", [1]),
        answers("six rewards of 0.3", [0.3] * 6),
        answers("all right", [1] * 4),
        answers("all wrong", [0] * 4),
        answers("negative rewards", [-1, -0.5, -2, 0]),
        answers("negative and equal", [-0.7] * 3),
        answers("nearly equal rewards", [0.3, 0.3 + 1e-12, 0.3]),
        case(TWINS, [deepcopy(twin) for twin in [author.answer(0.7)] * 7]),
        answers(HUGE_REWARDS, [HUGE, -HUGE, 1, 0]),
        case("an empty completion", [author.answer(1, ""), author.answer(0), author.answer(1), author.answer(0, "")]),
        case("only empty completions", [author.answer(reward, "") for reward in (1, 0)]),
        case("untrained tokens", [author.partly_trained(reward) for reward in (1, 0, 0.5)], plain=True),
        case("cut off", [author.answer(1, "x" * SEQ_LEN), author.answer(0), author.answer(0, "y" * SEQ_LEN)]),
    ]  # fmt: skip


class Author:
    """Makes rollouts as the sampler records them: token ids, prompt roles, logprobs and weights versions."""

    def __init__(self, fixtures: Fixtures, seed: int) -> None:
        self._fixtures = fixtures
        self._rng = random.Random(seed)
        self._end = fixtures.tokenizer.convert_tokens_to_ids(END)

    def answer(self, reward: float, text: str | None = None, agent: str = "policy") -> Rollout:
        """Return a rollout of one turn; the completion is random text if `text` is None, no token if it is empty."""
        messages: list[Message] = [{"role": "user", "content": ANSWER["question"]}]
        reply = self._words() if text is None else text
        turn = self._turn(self._fixtures.prompts.render(messages, []), reply)
        return _finished(reward, [turn], [*messages, _assistant(reply)], agent)

    def talk(self, reward: float) -> Rollout:
        """Return a rollout with a tool message and a user message: one sample of three turns."""
        replies: list[Message] = [{"role": "tool", "content": "42", "name": "multiply", "tool_call_id": "0"}]
        replies.append({"role": "user", "content": "Are you sure?"})
        messages: list[Message] = [{"role": "system", "content": "Be brief."}]
        messages.append({"role": "user", "content": ANSWER["question"]})
        turns = [self._turn(self._fixtures.prompts.render(messages, []), reply := self._words())]
        messages.append(_assistant(reply))
        for message in replies:
            prompt = self._fixtures.prompts.extend(turns[-1], [message], [])
            assert prompt is not None, "the chat format can extend a conversation"
            turns.append(self._turn(prompt, reply := self._words()))
            messages += [message, _assistant(reply)]
        return _finished(reward, turns, messages)

    def partly_trained(self, reward: float) -> Rollout:
        """Return a rollout of three turns, of which the first does not train, and the last without its first token."""
        turns = (rollout := self.talk(reward)).turns
        turns[0].mask = np.zeros(len(turns[0].completion_ids), np.bool_)
        turns[-1].mask = np.arange(len(turns[-1].completion_ids)) > 0
        return _finished(reward, turns, rollout.messages)

    def rewritten(self, reward: float) -> Rollout:
        """Return a rollout of two turns with separate prompts, so that each turn is its own sample."""
        turns, messages = [], []
        for question in ("What is 6 times 7?", "And 7 times 6?"):
            prompt: list[Message] = [{"role": "user", "content": question}]
            turns.append(self._turn(self._fixtures.prompts.render(prompt, []), reply := self._words()))
            messages += [*prompt, _assistant(reply)]
        return _finished(reward, turns, messages)

    def _turn(self, prompt: Prompt, reply: str) -> Turn:
        ids = [*self._fixtures.tokenizer.encode(reply), self._end] if reply else []
        logprobs = [-self._rng.random() - 0.01 for _ in ids]
        return Turn(
            prompt.array, np.array(ids), np.array(logprobs), np.full(len(ids), VERSION), 1.0, prompt_roles=prompt.roles
        )

    def _words(self) -> str:
        letters = self._rng.choices("abcdefgh ", k=self._rng.randint(3, 30))
        return f"The answer is {''.join(letters)}."


def bare_rollout(
    reward: float, length: int = 2, *, turns: int = 1, tool_tokens: int = 0, agent: str = "policy", episode: int = 0
) -> Rollout:
    """Return a rollout with a prompt of 1 token, `length` sampled tokens, and `tool_tokens` between turns."""
    context, roles, finished = [0], [0], []
    for turn in range(turns):
        if turn:
            context, roles = context + [7] * tool_tokens, roles + [TOOL] * tool_tokens
        sampled = length // turns if turn < turns - 1 else length - length // turns * (turns - 1)
        completion, logprobs, versions = np.ones(sampled), -np.ones(sampled), np.full(sampled, VERSION)
        finished.append(Turn(np.array(context), completion, logprobs, versions, 1.0, prompt_roles=np.array(roles)))
        context, roles = context + [1] * sampled, roles + [ROLES.index("assistant")] * sampled
    return replace(_finished(reward, finished, [_assistant("some words")], agent), episode=episode)


def _finished(reward: float, turns: list[Turn], messages: list[Message], agent: str = "policy") -> Rollout:
    samples = [sample.truncated(SEQ_LEN) for sample in merge_turns(turns)]
    return Rollout(agent=agent, turns=turns, samples=samples, messages=messages, stop_reason="stop", **_rewards(reward))


def _rewards(reward: float) -> dict[str, Any]:
    return {"reward": float(reward), "rewards": {"right": float(reward)}}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
