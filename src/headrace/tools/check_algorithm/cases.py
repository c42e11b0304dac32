"""Groups to test an algorithm on: plain ones from a seed, and edge cases that occur in long runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.rollout.merge import merge_turns
from headrace.rollout.types import ROLES, Message, Rollout, Task, Turn
from headrace.text.prompt import Prompt
from headrace.tools.check_algorithm.fixtures import END, SEQ_LEN, Fixtures

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


class Case(msgspec.Struct, frozen=True):
    """One finished group without credit."""

    name: str
    task: Task
    rollouts: list[Rollout]
    plain: bool = False
    """Whether every member has a completion and an ordinary reward."""

    def shifted(self, by: float) -> Case:
        """Return the case with `by` added to every reward."""
        rollouts = [msgspec.structs.replace(rollout, **_rewards(rollout.reward + by)) for rollout in self.rollouts]
        return Case(self.name, self.task, rollouts, self.plain)

    def mirrored(self) -> Case:
        """Return another group of the same task with the rewards' order reversed: the best becomes the worst."""
        rewards = [rollout.reward for rollout in self.rollouts]
        ends, group = min(rewards) + max(rewards), f"{self.rollouts[0].group_id}, mirrored"
        rollouts = [
            msgspec.structs.replace(rollout, group_id=group, **_rewards(ends - rollout.reward))
            for rollout in self.rollouts
        ]
        return Case(self.name, self.task, rollouts, self.plain)

    def with_task_suffix(self, suffix: str) -> Case:
        """Return the same group under another task key."""
        key = f"{self.task.key}, {suffix}"
        rollouts = [msgspec.structs.replace(rollout, task_key=key) for rollout in self.rollouts]
        return Case(self.name, msgspec.structs.replace(self.task, key=key), rollouts, self.plain)

    def members(self, indices: Sequence[int]) -> Case:
        """Return the case with only these rollouts, in this order."""
        return Case(self.name, self.task, [self.rollouts[index] for index in indices], self.plain)

    def copied(self) -> Case:
        return Case(self.name, _copied(self.task), _copied(self.rollouts), self.plain)


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
        case(
            "one against many",
            [author.answer(rng.random(), agent=a) for _ in range(3) for a in "abbb"],
            plain=True,
            agents=4,
        ),
        answers("one member", [1]),
        answers("six rewards of 0.3", [0.3] * 6),
        answers("all right", [1] * 4),
        answers("all wrong", [0] * 4),
        answers("negative rewards", [-1, -0.5, -2, 0]),
        answers("negative and equal", [-0.7] * 3),
        answers("nearly equal rewards", [0.3, 0.3 + 1e-12, 0.3]),
        case(TWINS, [_copied(twin) for twin in [author.answer(0.7)] * 7]),
        answers(HUGE_REWARDS, [HUGE, -HUGE, 1, 0]),
        case("an empty completion", [author.answer(1, ""), author.answer(0), author.answer(1), author.answer(0, "")]),
        case("only empty completions", [author.answer(reward, "") for reward in (1, 0)]),
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
    reward: float,
    length: int = 2,
    *,
    turns: int = 1,
    tool_tokens: int = 0,
    agent: str = "policy",
    episode: int = 0,
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
    return msgspec.structs.replace(_finished(reward, finished, [_assistant("some words")], agent), episode=episode)


def _finished(reward: float, turns: list[Turn], messages: list[Message], agent: str = "policy") -> Rollout:
    samples = [sample.truncated(SEQ_LEN) for sample in merge_turns(turns)]
    return Rollout(agent=agent, turns=turns, samples=samples, messages=messages, stop_reason="stop", **_rewards(reward))


def _rewards(reward: float) -> dict[str, Any]:
    return {"reward": float(reward), "rewards": {"right": float(reward)}}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _copied(value: Any) -> Any:
    """Return a deep copy, in a third of the time that `copy.deepcopy` takes."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, msgspec.Struct):
        return type(value)(*[_copied(getattr(value, name)) for name in value.__struct_fields__])
    if isinstance(value, list):
        return [_copied(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return value
