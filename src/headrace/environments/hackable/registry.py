"""Data providers and objectives, by name, by import path or by file, and the samples that they share.

The shipped ones are in `providers.py` and `objectives.py`; rewards have a registry of their own. A sample whose prompt
requests the strict format has the tags in its `info`, so that every reward parses a completion by the format that the
prompt requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import msgspec
import numpy as np

from headrace.environments.registry import Plugin, PluginRegistry
from headrace.environments.rewards.base import SampleData
from headrace.environments.strict_format import TAGS, format_with
from headrace.environments.tables import checksum, example_key
from headrace.errors import BadInput

Rows = Iterable[dict[str, Any]]
Tags = Sequence[str] | None


class TrainingSample(msgspec.Struct, frozen=True):
    """A prompt as the model sees it, the reference answer, and `info`, a dict of JSON values."""

    prompt: str
    answer: str
    info: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name of the example, by which records of other runs find it."""
        return example_key(self.prompt, self.answer, self.info)

    @property
    def data(self) -> SampleData:
        """The sample as rewards see it."""
        return SampleData(self.prompt, self.answer, self.info)


def make_sample(
    question: str, answer: str, info: Mapping[str, Any], instructions: str | None = None, tags: Tags = None
) -> TrainingSample:
    """Return a sample whose prompt is the instructions for the strict format, then the question.

    `instructions` replaces those; "" leaves the question alone. The key depends on neither, so that an example keeps
    its name under other instructions.
    """
    strict = format_with(tags)
    words = strict.instructions if instructions is None else instructions
    key = info.get("key")
    entries = {**info, "question": question, "key": checksum(question, answer) if key is None else str(key)}
    if tags is not None:
        entries[TAGS] = list(tags)
    return TrainingSample(f"{words}\n\n{question}" if words else question, answer, entries)


def make_samples(rows: Rows, instructions: str | None, tags: Tags) -> Iterator[TrainingSample]:
    """Yield a sample for each row of `question`, `answer` and further columns, which go to `info`."""
    for row in rows:
        info = {name: value for name, value in row.items() if name not in ("question", "answer")}
        yield make_sample(row["question"], row["answer"], info, instructions, tags)


DATA_PROVIDERS = PluginRegistry("data provider", "headrace.environments.hackable.providers")
OBJECTIVES = PluginRegistry("objective", "headrace.environments.hackable.objectives")
register_data_provider = DATA_PROVIDERS.decorator
register_objective = OBJECTIVES.decorator


class Progress(NamedTuple):
    """How far the policy that sampled a completion had been trained: optimizer steps and passes over the data."""

    step: int = 0
    epoch: float = 0.0


class Trace(NamedTuple):
    """How a completion was sampled; empty for a completion of a server that returns text alone."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    """At the sampling temperature, one per token."""
    latents: np.ndarray | None = None
    """[tokens, hidden size], zeros for plain tokens, if the policy thinks in latent space."""


NO_TRACE = Trace(np.zeros(0, np.int32), np.zeros(0, np.float32))


class Objective:
    """Base of all objectives, which combine the scores of rewards into the reward of a completion.

    Subclass, and implement `reward_names` and `combine_rewards`; all else is optional.

    An objective has no state: what changes in the course of a run follows from `Progress`, so that a resumed run
    continues with the same values.
    """

    algorithm: ClassVar[str | dict[str, Any]] = "grpo"
    """The algorithm that credits the rollouts of its groups, as a value of `orchestrator.train.env.algo`."""
    settings: ClassVar[dict[str, Any]] = {}
    """Further sections of a run file that it needs; what the user sets takes precedence."""

    def reward_names(self) -> list[str]:
        """Return the rewards that it combines: registered names, import paths or files."""
        raise NotImplementedError

    def combine_rewards(self, scores: Mapping[str, Sequence[float]], samples: Sequence[TrainingSample]) -> list[float]:
        """Return the reward of each completion, given each reward's score of each of them."""
        raise NotImplementedError

    def extra_reward(
        self, samples: Sequence[TrainingSample], completions: Sequence[str], traces: Sequence[Trace] = ()
    ) -> list[float] | None:
        """Return a further signal for each completion, which is added to the combined rewards.

        `traces` may be left out of your own.
        """
        return None

    def roles(self) -> dict[str, str]:
        """Return which rewards score correctness (`correct`) and format (`format`)."""
        return {"correct": "gsm8k_correctness_reward", "format": "format_tag_reward"}

    def at(self, progress: Progress) -> Self:
        """Return the objective as it is at this progress."""
        return self

    def metrics(self) -> dict[str, float]:
        """Return the values that change in the course of a run, for its log."""
        return {}


def in_order(provider: Plugin) -> Plugin:
    """Declare that the order of a provider's samples matters: a run draws them in order instead of shuffling them."""
    provider.in_order = True  # type: ignore[attr-defined]
    return provider


class DataProvider:
    """The samples of a provider, the same ones at each iteration."""

    def __init__(self, name: str, make: Callable[[], Iterable[TrainingSample]]) -> None:
        self._error = partial(BadInput, key="data provider", value=name)
        self._make = make

    def __iter__(self) -> Iterator[TrainingSample]:
        samples: Any = self._make()
        if not isinstance(samples, Iterable):
            raise self._error(f"expected an iterable of samples, got a {type(samples).__name__}")
        for number, sample in enumerate(samples):
            if not isinstance(sample, TrainingSample):
                raise self._error(f"sample {number} is a {type(sample).__name__}, not a TrainingSample")
            yield sample


def build_data_provider(name: str, kwargs: Mapping[str, Any] | None = None, seed: int = 0) -> DataProvider:
    """Return a provider with its kwargs. `seed` is used for one that takes a seed, unless its kwargs have one."""
    seeded = {"seed": seed} if "seed" in DATA_PROVIDERS.options(name) else {}
    return DataProvider(name, DATA_PROVIDERS.bind(name, {**seeded, **(kwargs or {})}))


def build_objective(name: str, kwargs: Mapping[str, Any] | None = None) -> Objective:
    objective = OBJECTIVES.construct(name, kwargs or {})
    if not isinstance(objective, Objective):
        raise BadInput("it is not a subclass of headrace.environments.hackable.Objective", key="objective", value=name)
    return objective
