"""`[orchestrator.algo]`: the keys that every algorithm has. Each algorithm declares its own in `headrace.algorithms`.

Defaults are the tested settings; there are no presets. `[orchestrator]` has the checks that need the renderer or
`seq_len`.
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
    """The model that samples the episodes."""


class ImportConfig(Config):
    """A function of your own; a text is its import path."""

    import_path: str
    """`package.module:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of your function."""

    @model_validator(mode="before")
    @classmethod
    def _read_text_as_path(cls, given: Any) -> Any:
        return spelled_out(given, "import_path")


class AlgorithmConfig(Alternative):
    """An algorithm: its keys, and the properties that other parts of a run depend on."""

    REGISTRY = ALGORITHMS
    ON_POLICY: ClassVar[bool] = True
    """Trains on samples of the policy, with the logprobs of the policy."""
    COMPARES: ClassVar[bool] = False
    """Gives credit relative to the other rollouts of the group."""
    HAS_ADVANTAGES: ClassVar[bool] = True
    """Gives credit as advantages, which gates and length penalties can read."""
    NEEDS_TEACHER: ClassVar[bool] = False
    """Requires a teacher."""
    RENDERER_FOR: ClassVar[str] = ""
    """Why it needs a renderer, as the end of a sentence that begins with its name; empty: it does not."""
    NEEDS_ROLES: ClassVar[bool] = False
    """Needs the role of each token, which the model's own chat template does not report."""
    LOSS: ClassVar[str] = "rl"
    """The loss components that it trains with, for the table in docs/reference/algorithms.md."""
    CREDIT: ClassVar[str] = ""
    """The credit of rollout i, with reward r_i in a group of n, for the table in docs/reference/algorithms.md."""
    UNSCORED: ClassVar[str] = ""
    """For an algorithm with hints: how rollouts that are too long to be scored are treated."""

    type: str
    sampling: AlgoSamplingConfig = Field(default_factory=AlgoSamplingConfig)
    """The model that samples the episodes that are trained on."""

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
        """The frozen model that samples the episodes; None: the policy samples them."""
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
    """Return the template; raise if it lacks the placeholder, or has another one that would not be replaced."""
    if template is not None and placeholder not in template:
        raise InvalidValue(
            f"the template has no {placeholder} in it", value=template, fix="Write it where the text belongs."
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
