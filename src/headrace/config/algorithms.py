"""`[orchestrator.algo]`: the keys that every algorithm has. Each algorithm declares its own in `headrace.algorithms`.

A type with no other key is the vetted setting: there are no presets. Checks that need more than the section itself, a
renderer or a length, are those of `[orchestrator]`.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from headrace.config.base import Config
from headrace.config.model_reference import FrozenModelConfig, ModelReference
from headrace.config.registry import Alternative, Registry
from headrace.config.shorthand import renamed, spelled_out, united
from headrace.errors import InvalidValue

ALGORITHMS: Registry[AlgorithmConfig] = Registry("algorithm", default="grpo")
LENGTH_PENALTIES: Registry[LengthPenaltyConfig] = Registry("length penalty")


class AlgoSamplingConfig(Config):
    source: ModelReference = "policy"
    """Which model plays the episodes."""


class ImportConfig(Config):
    """A function of your own; its import path alone is enough."""

    import_path: str
    """`package.module:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your function, beside what it is called with."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, given: Any) -> Any:
        return spelled_out(given, "import_path")


class AlgorithmConfig(Alternative):
    """An algorithm: what it is called, its keys, and what the rest of a run must know of it."""

    REGISTRY = ALGORITHMS
    ON_POLICY: ClassVar[bool] = True
    """Trains on what the policy sampled, with the logprobs that it gave to it."""
    COMPARES: ClassVar[bool] = False
    """Gives credit relative to the other rollouts of the group."""
    HAS_ADVANTAGES: ClassVar[bool] = True
    """Gives credit as advantages, which gates and length penalties can read."""
    NEEDS_TEACHER: ClassVar[bool] = False
    """Refuses a section without a teacher."""
    RENDERER_FOR: ClassVar[str] = ""
    """Why it needs a renderer, as the end of a sentence that begins with its name; empty: it needs none."""
    NEEDS_ROLES: ClassVar[bool] = False
    """Needs the role that wrote each token, which the model's own chat template does not give."""
    LOSS: ClassVar[str] = "rl"
    """The loss components that it trains with, for the table in docs/reference/algorithms.md."""
    CREDIT: ClassVar[str] = ""
    """The credit of rollout i, with reward r_i in a group of n, for the table in docs/reference/algorithms.md."""
    UNSCORED: ClassVar[str] = ""
    """For an algorithm with hints: what happens to rollouts that are too long to be scored."""

    type: str
    sampling: AlgoSamplingConfig = Field(default_factory=AlgoSamplingConfig)
    """Which model plays the episodes that are learned from."""

    @classmethod
    def spell_out(cls, table: dict[str, Any]) -> dict[str, Any]:
        """Accept `advantage` as another name of the section, and `model` as another name of `teacher`."""
        if "advantage" in table:
            other = spelled_out(table.pop("advantage"), "type")
            table = united(table, other, "", "advantage")
        section = ALGORITHMS.chosen_section(table)
        if "model" in table and section is not None and "teacher" in section.model_fields:
            table = renamed(table, "model", "teacher")
        return table

    @property
    def sampling_source(self) -> FrozenModelConfig | None:
        """The frozen model that plays the episodes; None: the policy plays them."""
        return None if self.sampling.source == "policy" else self.sampling.source

    @property
    def hints_policy(self) -> bool:
        """Whether the policy's own engines score samples with a hint before them."""
        return bool(self.UNSCORED) and getattr(self, "teacher", None) == "policy"

    @property
    def reads_tasks(self) -> bool:
        """Whether credit may depend on the tasks of the environment, and not on rollouts alone."""
        return False

    @model_validator(mode="after")
    def _samples_from_the_policy(self) -> Self:
        source = self.sampling.source
        if self.ON_POLICY and source != "policy":
            raise InvalidValue(
                f"{self.type} trains on what the policy itself sampled, with its logprobs",
                key="sampling.source",
                value=source.name,
                fix='Set sampling.source = "policy", or type = "sft" to learn what another model writes.',
            )
        return self


class LengthPenaltyConfig(Alternative):
    """A term of a group's credit that makes long rollouts worth less."""

    REGISTRY = LENGTH_PENALTIES
    OWN_BASELINE: ClassVar[bool] = False
    """Is defined over the plain mean of the group, and cannot be combined with a length-weighted baseline."""
    SHIFT_REASON: ClassVar[str] = ""
    """Why credit changes when a constant is added to all rewards; empty: it does not."""

    type: str

    @property
    def needs_seq_len(self) -> bool:
        """Whether lengths are measured in units of `seq_len`."""
        return False


def check_template(template: str | None, placeholder: str) -> str | None:
    """Return a template that has the placeholder, and no other that would be left in the text as it stands."""
    if template is not None and placeholder not in template:
        raise InvalidValue(
            f"the template has no {placeholder} in it", value=template, fix="Write it where the text shall go."
        )
    # A brace that follows a word or a power is LaTeX: \boxed{answer}, x^{n}.
    others = [name for name in re.findall(r"(?<![\w\\^}])\{[A-Za-z_]\w*\}", template or "") if name != placeholder]
    if others:
        raise InvalidValue(
            f"the template has {others[0]} in it, which nothing replaces",
            value=template,
            fix=f"Write {placeholder} alone.",
        )
    return template
