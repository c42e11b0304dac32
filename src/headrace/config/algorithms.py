"""`[orchestrator.algo]`: which algorithm credits an environment's rollouts, and its settings.

A type with no other key is the vetted setting: there are no presets. Checks that need more than the section itself, a
renderer or a length, are those of `[orchestrator]`.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from headrace.config.base import Config
from headrace.config.length_penalty import LengthPenaltyConfig, TokensPenaltyConfig, TurnsPenaltyConfig
from headrace.config.model_reference import FrozenModelConfig, ModelReference
from headrace.config.shorthand import renamed, spelled_out, united
from headrace.errors import InvalidValue


class AlgoSamplingConfig(Config):
    source: ModelReference = "policy"
    """Which model plays the episodes."""


class ImportConfig(Config):
    """A function of your own; its import path alone will do."""

    import_path: str
    """`package.module:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, given: Any) -> Any:
        return spelled_out(given, "import_path")


class _AlgoConfig(Config):
    ON_POLICY: ClassVar[bool] = True
    """Trained on what the policy sampled, with the logprobs that it gave to it."""
    COMPARES: ClassVar[bool] = False
    """Its credit is relative to the other rollouts of the group."""
    RENDERER_FOR: ClassVar[str] = ""
    """What it needs a renderer for, if it does."""

    type: str
    sampling: AlgoSamplingConfig = Field(default_factory=AlgoSamplingConfig)

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


class _CreditTermsConfig(_AlgoConfig):
    """Reward minus the group's mean, plus terms that are centered by their own means."""

    COMPARES = True

    length_penalty: LengthPenaltyConfig | None = None
    terms: list[ImportConfig] = Field(default_factory=list)
    """Functions of the group that give a bonus for each rollout, one more term of credit each."""


class _GroupCreditConfig(_CreditTermsConfig):
    """Reward minus the group's baseline, plus terms that are centered by the same baseline."""

    normalize: Literal["std"] | None = None
    """`std`: divide the centered reward by the group's standard deviation."""
    length_weighted_baseline: bool = False
    """The baseline is the mean over tokens, not over rollouts."""

    @model_validator(mode="after")
    def _one_baseline(self) -> Self:
        if self.length_weighted_baseline and isinstance(self.length_penalty, TokensPenaltyConfig | TurnsPenaltyConfig):
            raise InvalidValue(
                f'length_penalty.type = "{self.length_penalty.type}" has a baseline of its own, the plain mean',
                key="length_weighted_baseline",
                value=True,
                fix='Leave it out, or set length_penalty.type to "linear" or "overlong".',
            )
        return self


class GrpoConfig(_GroupCreditConfig):
    """Reward minus the group's mean."""

    type: Literal["grpo"] = "grpo"


class MaxRlConfig(_AlgoConfig):
    """Reward minus the group's mean, over the mean."""

    COMPARES = True

    type: Literal["max_rl"] = "max_rl"


class RewardAlgoConfig(_AlgoConfig):
    """The reward itself."""

    type: Literal["reward"] = "reward"


class EchoRoleConfig(Config):
    """The number alone will do."""

    alpha: float = Field(0.1, gt=0)
    """Weight of the tokens that this role wrote."""

    @model_validator(mode="before")
    @classmethod
    def _alpha_alone(cls, given: Any) -> Any:
        return spelled_out(given, "alpha", (int, float))


Role = Literal["system", "user", "assistant", "tool"]


def _default_roles() -> dict[Role, EchoRoleConfig]:
    return {"tool": EchoRoleConfig()}


class EchoConfig(_GroupCreditConfig):
    """GRPO on what the policy wrote, cross-entropy on what its environment answered."""

    RENDERER_FOR = "must know who wrote each token"

    type: Literal["echo"] = "echo"
    roles: dict[Role, EchoRoleConfig] = Field(default_factory=_default_roles)
    """Whose tokens are learned; setting any role replaces the table."""
    filter: ImportConfig | None = None
    """A function of a rollout that gives one keep-mask per turn; it can only narrow."""

    @field_validator("roles")
    @classmethod
    def _some_role(cls, given: Any) -> Any:
        if not given:
            raise InvalidValue(
                "echo without a role is grpo",
                value=given,
                fix='Set alpha of a role, as tool.alpha = 0.1, leave roles out for that, or set type = "grpo".',
            )
        return given


class OpdConfig(_AlgoConfig):
    """On-policy distillation: towards a frozen teacher on the policy's own samples."""

    type: Literal["opd"] = "opd"
    teacher: ModelReference | None = None
    max_concurrent: int = Field(32, ge=1)

    @model_validator(mode="after")
    def _has_another_teacher(self) -> Self:
        if self.teacher is None:
            raise InvalidValue(
                "opd needs a teacher, which is not set",
                key="teacher",
                fix="Set teacher.name, and teacher.base_url to where it is served.",
            )
        if self.teacher == "policy":
            raise InvalidValue(
                "the KL of the policy to itself is zero",
                key="teacher",
                value="policy",
                fix='Set teacher.name and teacher.base_url of another model, or type = "opsd", where the policy learns '
                "from a demonstration.",
            )
        return self


class OpsdConfig(_AlgoConfig):
    """On-policy self-distillation: towards the policy that has seen a demonstration."""

    RENDERER_FOR = "puts a demonstration before each sample"

    type: Literal["opsd"] = "opsd"
    teacher: ModelReference = "policy"
    demo_key: str = "demonstration"
    """Where a task has its demonstration: under this name in its `info`, or at its top level."""
    template: str | None = None
    """What is said before the sample, with {demonstration} in it; unset: see `headrace.algorithms.opsd`."""
    max_concurrent: int = Field(32, ge=1)

    @field_validator("template")
    @classmethod
    def _has_its_place(cls, given: str | None) -> str | None:
        return _template(given, "{demonstration}")


class SftAlgoConfig(_AlgoConfig):
    """A frozen teacher plays, the policy learns to say the same."""

    ON_POLICY = False

    type: Literal["sft"] = "sft"
    teacher: ModelReference | None = None
    """Another name of `sampling.source`, where it is to be found."""

    @model_validator(mode="after")
    def _teacher_is_source(self) -> Self:
        teacher, source = self.teacher, self.sampling.source
        if teacher is not None and "source" in self.sampling.model_fields_set and teacher != source:
            raise InvalidValue(
                f"another name of sampling.source, which is {_shown(source)}",
                key="teacher",
                value=_shown(teacher),
                fix="Give one of them, or the same value twice.",
            )
        source = source if teacher is None else teacher
        if source == "policy":
            raise InvalidValue(
                "sft learns what another model writes, and would sample from the policy",
                key="teacher",
                fix="Set teacher.name, and teacher.base_url to where it is served.",
            )
        object.__setattr__(self, "sampling", AlgoSamplingConfig(source=source))
        object.__setattr__(self, "teacher", None)
        return self


class RlcsdConfig(_CreditTermsConfig):
    """Standardized group credit, modulated per token by what correct and incorrect siblings would have made of it."""

    RENDERER_FOR = "puts hints before each sample"
    normalize: ClassVar[Literal["std"]] = "std"
    length_weighted_baseline: ClassVar[bool] = False

    type: Literal["rlcsd"] = "rlcsd"
    teacher: ModelReference = "policy"
    correct_threshold: float = 1.0
    min_contrast_gap: float = Field(0.0, ge=0)
    num_negative_hints: int = Field(4, ge=1)
    lam: float = Field(0.5, ge=0)
    tau: float = Field(0.02, gt=0)
    delta: float = Field(0.02, ge=0)
    eta: float = Field(1.0, ge=0)
    normalization: Literal["fold", "rollout_mean"] = "fold"
    template: str | None = None
    """What is said before the sample, with {response} in it; unset: see `headrace.algorithms.rlcsd`."""
    hint_filter: ImportConfig | None = None
    """A function that narrows the siblings that may be hints."""
    max_concurrent: int = Field(32, ge=1)

    @field_validator("template")
    @classmethod
    def _has_its_place(cls, given: str | None) -> str | None:
        return _template(given, "{response}")


class RaeConfig(_AlgoConfig):
    """Reward minus a running average of what this agent has earned so far."""

    type: Literal["rae"] = "rae"
    decay: float = Field(0.95, ge=0, lt=1)
    """How much of an agent's baseline is left after each of its rollouts."""


class HierarchicalGrpoConfig(_AlgoConfig):
    """Reward minus the mean of the peers: rollouts of the same agent, in the group or in the episode."""

    COMPARES = True

    type: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    episode_agents: list[str] = Field(default_factory=list)
    """Agents that are compared within their own episode; the others are with their like in the whole group."""


class CustomAlgoConfig(_AlgoConfig):
    """A function of the group that gives each rollout's advantage, or one per token."""

    type: Literal["custom"] = "custom"
    import_path: str
    """`package.module:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)


class ImportedAlgoConfig(_AlgoConfig):
    """An algorithm of your own: a subclass of `headrace.algorithms.base.Algorithm`."""

    ON_POLICY = False  # it may be, but only the class itself can tell

    type: str
    """`package.module:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """What it is constructed with."""


_OURS: dict[str, type[_AlgoConfig]] = {
    kind.model_fields["type"].default: kind
    for kind in (
        GrpoConfig,
        MaxRlConfig,
        RewardAlgoConfig,
        EchoConfig,
        OpdConfig,
        OpsdConfig,
        SftAlgoConfig,
        RlcsdConfig,
        RaeConfig,
        HierarchicalGrpoConfig,
        CustomAlgoConfig,
    )
}


def _kind_of_algorithm(value: Any) -> str:
    chosen = value.get("type", "grpo") if isinstance(value, dict) else getattr(value, "type", "grpo")
    return "imported" if ":" in str(chosen) else str(chosen)


def algo_table(given: Any) -> Any:
    """A copy of an `algo` section in which every plain value is the table that it stands for: two can be compared."""
    table = spelled_out(given, "type")
    if not isinstance(table, dict):
        return given
    table = dict(table)
    for key, short in {"length_penalty": "type", "filter": "import_path", "hint_filter": "import_path"}.items():
        if key in table:
            table[key] = spelled_out(table[key], short)
    if isinstance(terms := table.get("terms"), list):
        table["terms"] = [spelled_out(term, "import_path") for term in terms]
    if isinstance(roles := table.get("roles"), dict):
        table["roles"] = {role: spelled_out(alpha, "alpha", (int, float)) for role, alpha in roles.items()}
    return table


def _algo_spelled_out(given: Any) -> Any:
    """An `algo` section in the one way to write it, with no key that belongs to another type."""
    table = algo_table(given)
    if not isinstance(table, dict):
        return given
    if "advantage" in table:
        table = united(table, algo_table(table.pop("advantage")), "", "advantage")
    chosen = str(table.get("type", "grpo"))
    if _kind_of_algorithm(table) not in (*_OURS, "imported"):
        raise InvalidValue("unknown algorithm", key="type", value=chosen, fix=_known_algorithms(chosen))
    known = _OURS.get(chosen, ImportedAlgoConfig).model_fields
    if "model" in table and "teacher" in known:
        table = renamed(table, "model", "teacher")
    for key in (key for key in table if key not in known):
        owners = [name for name, other in _OURS.items() if key in other.model_fields]
        fact = f"{chosen} has no such key" + (f"; it is one of {' and '.join(owners)}" if owners else "")
        if chosen not in _OURS:
            close = difflib.get_close_matches(str(key), known, n=1)
            meant = f" Did you mean {close[0]}?" if close else ""
            fix = f"Write what your own class takes as kwargs.{key}.{meant}"
            raise InvalidValue(fact, key=str(key), value=table[key], fix=fix)
        if owners:
            raise InvalidValue(fact, key=str(key), value=table[key], fix="Leave it out, or set another type.")
    return table


def _known_algorithms(chosen: str) -> str:
    close = difflib.get_close_matches(chosen, _OURS, n=1)
    meant = f"Did you mean {close[0]}? " if close else ""
    return f"{meant}Known: {', '.join(_OURS)}; your own is named by import path, package.module:Class."


AlgoConfig = Annotated[
    Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[MaxRlConfig, Tag("max_rl")]
    | Annotated[RewardAlgoConfig, Tag("reward")]
    | Annotated[EchoConfig, Tag("echo")]
    | Annotated[OpdConfig, Tag("opd")]
    | Annotated[OpsdConfig, Tag("opsd")]
    | Annotated[SftAlgoConfig, Tag("sft")]
    | Annotated[RlcsdConfig, Tag("rlcsd")]
    | Annotated[RaeConfig, Tag("rae")]
    | Annotated[HierarchicalGrpoConfig, Tag("hierarchical_grpo")]
    | Annotated[CustomAlgoConfig, Tag("custom")]
    | Annotated[ImportedAlgoConfig, Tag("imported")],
    Discriminator(_kind_of_algorithm),
    BeforeValidator(_algo_spelled_out),
]


def sampling_source(algo: AlgoConfig) -> FrozenModelConfig | None:
    """The frozen model that plays the episodes; None: the policy does."""
    return None if algo.sampling.source == "policy" else algo.sampling.source


def takes_length_penalty(kind: str) -> bool:
    """Whether a length penalty is part of this type's credit."""
    return "length_penalty" in _OURS.get(kind, ImportedAlgoConfig).model_fields


def has_rl_credit(algo: AlgoConfig) -> bool:
    """Whether its credit is advantages; of one's own class only that class can tell."""
    return not isinstance(algo, OpdConfig | OpsdConfig | SftAlgoConfig)


def hints_the_policy(algo: AlgoConfig) -> bool:
    """Whether the policy's own engines score samples with something before them."""
    return isinstance(algo, OpsdConfig | RlcsdConfig) and algo.teacher == "policy"


def _template(given: str | None, place: str) -> str | None:
    """A template, if it has the place where the text goes, and no other that would be read as it stands."""
    if given is not None and place not in given:
        raise InvalidValue(f"the template has no {place} in it", value=given, fix="Write it where the text shall go.")
    # A brace that follows a word or a power is LaTeX: \boxed{answer}, x^{n}.
    others = [found for found in re.findall(r"(?<![\w\\^}])\{[A-Za-z_]\w*\}", given or "") if found != place]
    if others:
        raise InvalidValue(
            f"the template has {others[0]} in it, which nothing replaces", value=given, fix=f"Write {place} alone."
        )
    return given


def _shown(model: ModelReference) -> str:
    return model if model == "policy" else f"{model.name} at {', '.join(model.base_url)}"
