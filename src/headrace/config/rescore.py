"""The configuration of a run as if it had another algorithm, for `headrace rescore`: checked as a run file is."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config.algorithm_keys import put_algorithm_keys
from headrace.config.algorithms import AlgoConfig, SftAlgoConfig, hints_the_policy, sampling_source
from headrace.config.base import ConfigError, Tree, validate
from headrace.config.model_reference import FrozenModelConfig
from headrace.config.run import RunConfig


def with_algorithm(
    config: RunConfig, kind: str | None, length_penalty: str | None, overrides: Sequence[str], env: str | None
) -> RunConfig:
    """The same run with this algorithm for every environment, or for one.

    Without `kind` each environment keeps its own. `overrides` are written as on a command line, `--algo.key value`.
    """
    tree = config.model_dump(mode="json", exclude_none=True)["orchestrator"]
    entries: list[Tree] = [entry for entry in tree["train"]["env"] if env in (None, entry["name"])]
    if not entries:
        there = ", ".join(entry.name for entry in config.orchestrator.train.env)
        raise ConfigError(f"--env {env}: the run has no such environment to train on; it has {there}")
    if kind is not None:
        for entry in entries:
            entry.pop("algo", None)
        tree["algo"] = {"type": kind}
    sections = [entry["algo"] for entry in entries if "algo" in entry]
    if len(sections) < len(entries):  # some inherit theirs
        sections.append(tree["algo"])
    for section in sections:
        if length_penalty is not None:
            section["length_penalty"] = {"type": length_penalty}
        put_algorithm_keys(section, overrides)
    whole = {**config.model_dump(mode="json", exclude_none=True), "orchestrator": tree}
    return validate(RunConfig, whole, "command line")[0]


def refuse_what_cannot_be_rescored(env: str, was: AlgoConfig, algo: AlgoConfig) -> None:
    """Raise where saved rollouts do not hold what the algorithm needs."""
    if isinstance(algo, SftAlgoConfig):
        raise ConfigError(
            f"environment {env!r}: sft trains on what its teacher writes, and these rollouts are the policy's "
            "own: there is nothing to recompute; opd learns from a teacher on the policy's own tokens"
        )
    source = sampling_source(was)
    if source is not None:
        raise ConfigError(
            f"environment {env!r}: its rollouts were sampled by {source.name}, not by the policy: no algorithm "
            "but sft can train on them, so there is nothing to compare"
        )
    if hints_the_policy(algo):
        raise ConfigError(
            f"environment {env!r}: {algo.type} asks the policy how likely it finds each sample, and the policy of "
            "that time is gone: give a frozen teacher instead, for example a checkpoint of the run that `headrace "
            "export` wrote and `headrace serve` serves: --algo.teacher.name NAME --algo.teacher.base_url "
            "http://host:port/v1"
        )


def described(algo: AlgoConfig) -> str:
    """An algorithm in a few words: its type, and what is not as it is by default."""
    settings = algo.model_dump(mode="json", exclude_defaults=True, exclude={"type", "length_penalty", "teacher"})
    words = [f"{key} = {value}" for key, value in settings.items()]
    penalty = getattr(algo, "length_penalty", None)
    if penalty is not None:
        changed = penalty.model_dump(mode="json", exclude_defaults=True, exclude={"type"})
        words.insert(0, " ".join([f"{penalty.type} length penalty", *(f"{k} = {v}" for k, v in changed.items())]))
    teacher = getattr(algo, "teacher", None)
    if isinstance(teacher, FrozenModelConfig):
        words.insert(0, f"teacher {teacher.name}")
    return f"{algo.type} ({', '.join(words)})" if words else algo.type


def short_name(algo: AlgoConfig) -> str:
    """An algorithm as part of a file's name."""
    penalty = getattr(algo, "length_penalty", None)
    name = algo.type.rpartition(":")[2]
    return name if penalty is None else f"{name}-{penalty.type}"
