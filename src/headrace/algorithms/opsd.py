"""On-policy self-distillation: towards what the policy itself would say if it had seen a demonstration.

    ref_t = log p_teacher(token_t | hint, all before it)        hint = the demonstration, in a template

The hint is in the conversation of the sample's first prompt (`headrace.algorithms.hints`). The sample's own tokens are
scored verbatim, so that any number of turns works. The teacher is the live policy, the policy some steps ago, or a
frozen model. Rewards are logged and not used. A rollout that the teacher did not score is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from headrace.algorithms.base import MakeContext, RolloutView, Survivor
from headrace.algorithms.hints import Hints, conversation_text
from headrace.algorithms.teacher import DistillationConfig, TaughtAlgorithm
from headrace.config.algorithms import ALGORITHMS, check_template
from headrace.config.model import TeacherReference
from headrace.inference.client.reference import Reference
from headrace.rollout.types import Task

PLACEHOLDER = "{demonstration}"
TEMPLATE = """\
Here is a demonstration of how the task below can be done well:

{demonstration}

Understand why it works. Then do the task below in your own words, step by step."""


@ALGORITHMS.register
class OpsdConfig(DistillationConfig):
    """On-policy self-distillation: towards the policy that has seen a demonstration."""

    LOSS = "ref_kl"
    CREDIT = "none: towards the policy that has seen a demonstration"
    RENDERER_FOR = "puts a demonstration before each sample"
    UNSCORED = "dropped"
    READS_TASKS = True

    type: Literal["opsd"] = "opsd"
    teacher: TeacherReference = "policy"
    """The model that scores samples with the demonstration before them: the live policy, `{ every = N }`: the policy
    after a step that N divides, on a further server of the run, or a frozen model."""
    demo_key: str = "demonstration"
    """The key of a task's demonstration, in its `info` or at its top level."""
    template: str | None = None
    """The message before the sample, with {demonstration} in it; unset: see `headrace.algorithms.opsd`."""
    max_concurrent: int = Field(32, ge=1)
    """Requests to the teacher at once."""

    def make(self, context: MakeContext) -> Opsd:
        return Opsd(self, context.reference(self.teacher))

    def example_info(self) -> dict[str, str]:
        return {self.demo_key: "6 times 7 is 42."}

    @field_validator("template")
    @classmethod
    def _has_placeholder(cls, template: str | None) -> str | None:
        return check_template(template, PLACEHOLDER)


class Opsd(TaughtAlgorithm):
    action_loss_type = "ref_kl"

    def __init__(self, config: OpsdConfig | None = None, teacher: Reference | None = None) -> None:
        config = config or OpsdConfig()
        super().__init__(teacher, config.max_concurrent, config.UNSCORED)
        self._demo_key = config.demo_key
        self._template = TEMPLATE if config.template is None else config.template

    async def score_rollout(self, rollout: RolloutView) -> None:
        """Raise for a task without a demonstration on arrival, before its batch is complete."""
        if not demonstration(rollout.task, self._demo_key).strip() and self._template != PLACEHOLDER:
            raise ValueError(
                f"task {rollout.task.key} of {rollout.task.env} has an empty demonstration as {self._demo_key!r}: opsd "
                "would learn from the words around it alone; fill it in, or take the task out of the data"
            )

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        hints = Hints(self.host, self._template, PLACEHOLDER)
        prompts = [
            await hints.prompt(survivor.rollout, sample, demonstration(survivor.task, self._demo_key))
            for survivor in batch
            for sample in survivor.samples
        ]
        self.report_separate_hints(hints.separate)
        await self.distil(batch, prompts)


def demonstration(task: Task, key: str) -> str:
    """Return a task's demonstration as text: under `key` in its `info`, else at its top level."""
    info = task.data.get("info")
    inner: Any = info.get(key) if isinstance(info, dict) else None
    value = inner or task.data.get(key, inner)  # an empty one does not hide the other
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return conversation_text(value)
    problem = "has no demonstration" if value is None else f"has a demonstration that is a {type(value).__name__}"
    raise ValueError(
        f"task {task.key} of {task.env} {problem}: opsd needs a text or a list of messages as {key!r} in its info or "
        "at its top level; add it to the data, or set demo_key to the name that it has"
    )
