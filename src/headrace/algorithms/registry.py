"""From an `algo` section to the algorithm that it names. Every number that an algorithm needs is handed over here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

from headrace import imports
from headrace.algorithms.base import Algorithm
from headrace.algorithms.custom import Custom
from headrace.algorithms.echo import Echo
from headrace.algorithms.group_credit import GroupCredit
from headrace.algorithms.grpo import Grpo
from headrace.algorithms.hierarchical_grpo import HierarchicalGrpo
from headrace.algorithms.length_penalty import Efficiency, LengthPenalty, Linear, Overlong
from headrace.algorithms.max_rl import MaxRl
from headrace.algorithms.opd import Opd
from headrace.algorithms.opsd import Opsd
from headrace.algorithms.rae import Rae
from headrace.algorithms.reward import Reward
from headrace.algorithms.rlcsd import Rlcsd
from headrace.algorithms.sft import Sft
from headrace.algorithms.user_function import check_kwargs, load_function
from headrace.config.algorithms import (
    AlgoConfig,
    CustomAlgoConfig,
    EchoConfig,
    GrpoConfig,
    HierarchicalGrpoConfig,
    ImportConfig,
    ImportedAlgoConfig,
    MaxRlConfig,
    OpdConfig,
    OpsdConfig,
    RaeConfig,
    RewardAlgoConfig,
    RlcsdConfig,
    SftAlgoConfig,
)
from headrace.config.length_penalty import (
    LengthPenaltyConfig,
    LinearPenaltyConfig,
    OverlongPenaltyConfig,
    TokensPenaltyConfig,
    TurnsPenaltyConfig,
)
from headrace.config.model_reference import FrozenModelConfig, ModelReference
from headrace.errors import BadInput
from headrace.inference.client.reference import Reference

Connect = Callable[[FrozenModelConfig], Reference]
"""Makes a reference of the model that somebody serves."""


def make_algorithm(config: AlgoConfig, *, seq_len: int, connect: Connect) -> Algorithm:
    """The algorithm, constructed but not yet set up: it still needs its `host`."""
    match config:
        case GrpoConfig():
            return Grpo(_group_credit(config, seq_len))
        case MaxRlConfig():
            return MaxRl()
        case RewardAlgoConfig():
            return Reward()
        case EchoConfig():
            alphas = {role: entry.alpha for role, entry in config.roles.items()}
            return Echo(_group_credit(config, seq_len), alphas, _echo_filter(config))
        case OpdConfig():
            teacher = _reference(config.teacher, connect)
            assert teacher is not None, "the configuration refuses opd without a frozen teacher"
            return Opd(teacher, config.max_concurrent)
        case OpsdConfig():
            return Opsd(
                _reference(config.teacher, connect),
                demo_key=config.demo_key,
                template=config.template,
                max_concurrent=config.max_concurrent,
            )
        case SftAlgoConfig():
            return Sft()
        case RlcsdConfig():
            return _rlcsd(config, seq_len, connect)
        case RaeConfig():
            return Rae(config.decay)
        case HierarchicalGrpoConfig():
            return HierarchicalGrpo(config.episode_agents)
        case CustomAlgoConfig():
            return Custom(_function(config, "algorithm"))
        case ImportedAlgoConfig():
            return _imported_class(config)(**config.kwargs)
        case _:
            assert_never(config)


def check_imports(config: AlgoConfig) -> None:
    """Refuse code of the user's that is not there, or does not take its kwargs; nothing of it is called."""
    match config:
        case GrpoConfig():
            _terms(config)
        case EchoConfig():
            _terms(config)
            _echo_filter(config)
        case RlcsdConfig():
            _terms(config)
            _hint_filter(config)
        case CustomAlgoConfig():
            _function(config, "algorithm")
        case ImportedAlgoConfig():
            _imported_class(config)


def _group_credit(config: GrpoConfig | EchoConfig | RlcsdConfig, seq_len: int) -> GroupCredit:
    return GroupCredit(
        normalize=config.normalize,
        length_weighted=config.length_weighted_baseline,
        penalty=None if config.length_penalty is None else make_penalty(config.length_penalty, seq_len),
        terms=_terms(config),
    )


def _terms(config: GrpoConfig | EchoConfig | RlcsdConfig) -> list[Callable[..., Any]]:
    return [_function(term, "term") for term in config.terms]


def _echo_filter(config: EchoConfig) -> Callable[..., Any] | None:
    return None if config.filter is None else _function(config.filter, "filter of echo")


def make_penalty(config: LengthPenaltyConfig, seq_len: int) -> LengthPenalty:
    match config:
        case LinearPenaltyConfig(normalize_by="group_max"):
            weights = config.output_weight, config.input_weight, config.turns_weight
            return Linear.by_group_max(*weights, gated=config.gate_by_correctness)
        case LinearPenaltyConfig():
            return Linear.by_seq_len(config.coef, seq_len, gated=config.gate_by_correctness)
        case TokensPenaltyConfig():
            return Efficiency.in_tokens(config.completion_weight, config.tool_response_weight)
        case TurnsPenaltyConfig():
            return Efficiency.in_turns()
        case OverlongPenaltyConfig():
            return Overlong(config.max_tokens, config.cache_tokens)
        case _:
            assert_never(config)


def _rlcsd(config: RlcsdConfig, seq_len: int, connect: Connect) -> Rlcsd:
    return Rlcsd(
        _reference(config.teacher, connect),
        credit=_group_credit(config, seq_len),
        correct_threshold=config.correct_threshold,
        min_contrast_gap=config.min_contrast_gap,
        num_negative_hints=config.num_negative_hints,
        lam=config.lam,
        tau=config.tau,
        delta=config.delta,
        eta=config.eta,
        normalization=config.normalization,
        template=config.template,
        hint_filter=_hint_filter(config),
        max_concurrent=config.max_concurrent,
    )


def _hint_filter(config: RlcsdConfig) -> Callable[..., Any] | None:
    return None if config.hint_filter is None else _function(config.hint_filter, "hint_filter of rlcsd")


def _reference(model: ModelReference | None, connect: Connect) -> Reference | None:
    """None is the policy, which the host has."""
    return connect(model) if isinstance(model, FrozenModelConfig) else None


def _imported_class(config: ImportedAlgoConfig) -> type[Algorithm]:
    kind = imports.load(config.type, "algorithm")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        fact = "it is not a subclass of headrace.algorithms.base.Algorithm"
        raise BadInput(fact, key="algorithm", value=config.type)
    check_kwargs(kind, (), config.kwargs, "algorithm", config.type)
    return kind


def _function(config: ImportConfig | CustomAlgoConfig, what: str) -> Callable[..., Any]:
    return load_function(config.import_path, config.kwargs, what)
