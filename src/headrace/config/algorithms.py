"""`[orchestrator.algo]`: what every algorithm declares: its keys, how it is made, and what `check-algorithm` tests.

One file of `headrace.algorithms` per algorithm has a subclass of `AlgorithmConfig` with `@ALGORITHMS.register`. Run
files, `--explain`, docs/reference, dry-run checks and `check-algorithm` are derived from it. Defaults are the tested
settings; there are no presets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from pydantic import Discriminator, Field, Tag, model_validator

from headrace.config.base import Config, as_table, merge_names, rename_key
from headrace.config.model import PAST, FrozenModelConfig, ModelReference, PastPolicyConfig, model_tag, only_text
from headrace.config.registry import Alternative, Registry
from headrace.config.trainer import ReferenceConfig
from headrace.errors import InvalidValue

ALGORITHMS: Registry[AlgorithmConfig] = Registry("algorithm", default="grpo")

Invariant = Literal["shift", "zero_sum", "signs", "order"]
INVARIANTS: tuple[Invariant, ...] = get_args(Invariant)
FINAL = "credit is final once the group is scored"
MAX_TEMPLATE_TOKENS = 256
"""A generous bound on the template around a hint."""


class Promises(msgspec.Struct, frozen=True):
    """The invariants of an algorithm's credit."""

    kept: frozenset[Invariant] = frozenset()
    """Those that must hold."""
    reasons: dict[Invariant, str] = msgspec.field(default_factory=dict)
    """Why others cannot hold. What is in neither is tried and reported without being judged."""
    length_weighted: bool = False
    """Whether the baseline that credit sums to zero around is the mean over tokens."""
    reward_alone: bool = True
    """Whether members with equal rewards have equal credit."""


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
    def _read_text_as_path(cls, value: Any) -> Any:
        return as_table(value, "import_path")


KlReference = Annotated[
    Annotated[Literal["start"], Tag("text")]
    | Annotated[PastPolicyConfig, Tag("past")]
    | Annotated[FrozenModelConfig, Tag("frozen")],
    Discriminator(model_tag),
    only_text("start", PAST),
]
"""The policy at the start of the run, the policy some steps ago, or a frozen model on a server."""


class KlConfig(Config):
    """A penalty for the distance between the policy and a reference policy, estimated from the sampled tokens.

    With d = ref - t, the difference of a token's logprobs: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1.
    """

    coef: float = Field(ge=0)
    """Its weight; 0 is the same as no penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated: k1 and k3 without bias, k2 and k3 never negative."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term of each trained token's loss, with the policy in training. `reward`: the sum over a rollout's
    sampled tokens, at the policy that sampled them, lowers its reward before rollouts are compared."""
    ratio: bool = False
    """`loss`: multiply the estimate by the ratio to the policy that sampled, as TRL does by default. Without it, the
    estimate is that of the policy in training only as long as rollouts are fresh."""
    reference: KlReference = "start"
    """The policy at the `start` of the run; `{ every = N }`: the policy after the last step that N divides; or a frozen
    model on a server. The trainer keeps the run's own past; for a penalty in the reward, a further server of the run
    serves its start."""

    @property
    def kept_by_trainer(self) -> ReferenceConfig | None:
        """The policy of the run's own past that scores its tokens in the trainer; None: a server does, or nothing."""
        if self.coef == 0 or self.place == "reward" or isinstance(self.reference, FrozenModelConfig):
            return None
        return ReferenceConfig(every=None if self.reference == "start" else self.reference.every)

    def problems(self) -> Iterator[InvalidValue]:
        if self.estimator == "k1" and self.place == "loss":
            fact = "the expected gradient of k1 in the loss is 0 on the policy's own samples: it would only add noise"
            yield self.invalid("estimator", fact, 'Set estimator to "k3" or "k2", or place = "reward".')
        if self.place == "reward" and self.ratio:
            fact = "a penalty in the reward is that of the policy that sampled: the ratio is 1"
            yield self.invalid("ratio", fact, 'Leave it out, or set place = "loss".')
        if self.place == "reward" and isinstance(self.reference, PastPolicyConfig):
            fact = (
                'place = "reward" charges a rollout when it arrives, before it is known which step it is trained in, '
            )
            fact += "and so which past policy is its reference"
            fix = 'Set reference = "start", a frozen model, or place = "loss".'
            yield InvalidValue(fact, key="reference", value=self.reference.model_dump(), fix=fix)


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
    READS_TASKS: ClassVar[bool] = False
    """Reads the tasks of the environment, whatever its keys are."""
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
    def expand_shorthands(cls, table: dict[str, Any]) -> dict[str, Any]:
        """Accept `advantage` as another name of the section, and `model` as another name of `teacher`."""
        if "advantage" in table:
            other = as_table(table.pop("advantage"), "type")
            table = merge_names(table, other, "", "advantage")
        section = ALGORITHMS.chosen_section(table)
        if "model" in table and section is not None and "teacher" in section.model_fields:
            table = rename_key(table, "model", "teacher")
        return table

    @property
    def sampling_source(self) -> FrozenModelConfig | None:
        """The frozen model that samples the episodes; None: the policy samples them."""
        return None if self.sampling.source == "policy" else self.sampling.source

    @property
    def hints_policy(self) -> bool:
        """Whether the run's own engines score samples with a hint before them."""
        return bool(self.UNSCORED) and not isinstance(getattr(self, "teacher", None), FrozenModelConfig)

    @property
    def past_policies(self) -> list[Literal["start"] | PastPolicyConfig]:
        """The policies of the run's own past that a further server of the run scores with."""
        teacher, kl = getattr(self, "teacher", None), getattr(self, "kl", None)
        charged = isinstance(kl, KlConfig) and kl.coef > 0 and kl.place == "reward" and kl.reference == "start"
        past: list[Literal["start"] | PastPolicyConfig] = [teacher] if isinstance(teacher, PastPolicyConfig) else []
        return [*past, "start"] if charged else past

    @property
    def reads_tasks(self) -> bool:
        """Whether credit may depend on the tasks of the environment, and not on rollouts alone."""
        return self.READS_TASKS

    def make(self, context: Any) -> Any:
        """Construct the `Algorithm`, given a `MakeContext`; it still needs its `host` and `setup`."""
        raise NotImplementedError

    def check_imports(self) -> None:
        """Raise `BadInput` if the user's code cannot be imported or does not take its kwargs; none of it is called."""

    def promises(self, algorithm: Any) -> Promises:
        """Return what `headrace check-algorithm` tests of the algorithm that `make` returned."""
        return Promises()

    def example_info(self) -> dict[str, str]:
        """Return the keys of a task's `info` that the algorithm needs, with example values."""
        return {}

    def problems(self) -> Iterator[InvalidValue]:
        source = self.sampling.source
        if self.ON_POLICY and source != "policy":
            fact = f"{self.type} trains on what the policy itself sampled, with its logprobs"
            fix = 'Set sampling.source = "policy", or type = "sft" to learn what another model writes.'
            yield InvalidValue(fact, key="sampling.source", value=source.name, fix=fix)


class AdvantageConfig(AlgorithmConfig):
    """An algorithm that gives advantages, for the rl loss."""

    kl: KlConfig | None = None
    """A penalty for the distance to a reference policy; unset: none."""


def hinted_length(seq_len: int) -> int:
    """Return the tokens of a sample, of a hint of the same length and of the template around the hint."""
    return 2 * seq_len + MAX_TEMPLATE_TOKENS


def check_template(template: str | None, placeholder: str) -> str | None:
    """Return the template; raise if it lacks the placeholder, or has another one that would not be replaced."""
    if template is not None and placeholder not in template:
        fact, fix = f"the template has no {placeholder} in it", "Write it where the text belongs."
        raise InvalidValue(fact, value=template, fix=fix)
    # A brace that follows a word or a power is LaTeX: \boxed{answer}, x^{n}.
    others = [name for name in re.findall(r"(?<![\w\\^}])\{[A-Za-z_]\w*\}", template or "") if name != placeholder]
    if others:
        fact, fix = f"the template has {others[0]} in it, which nothing replaces", f"Write {placeholder} alone."
        raise InvalidValue(fact, value=template, fix=fix)
    return template
