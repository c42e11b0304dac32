"""The configuration of a run with another algorithm, validated like a run file."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.algorithms.length_penalties import LengthPenaltyConfig
from headrace.config.algorithms import ALGORITHMS, AlgorithmConfig
from headrace.config.base import Config, ConfigError, Tree
from headrace.config.model import FrozenModelConfig
from headrace.runfile.reading import put_algorithm_keys, validate
from headrace.runfile.run import RunConfig

Algorithms = dict[str, AlgorithmConfig]
"""By environment."""
Penalties = dict[str, LengthPenaltyConfig]
"""By environment: length penalties of algorithms that take none in a run."""


def algorithms_of(config: RunConfig, env: str | None) -> Algorithms:
    """Return the algorithms of all environments of a run, or of one."""
    chosen = (entry for entry in config.orchestrator.train.env if env in (None, entry.name))
    return {entry.name: config.orchestrator.algo_of(entry) for entry in chosen}


def with_algorithm(
    config: RunConfig, kind: str | None, length_penalty: str | None, overrides: Sequence[str], env: str | None
) -> tuple[RunConfig, Penalties]:
    """Return the run with this algorithm for every environment, or for one, and the penalties it does not take.

    Without `kind` each environment keeps its own algorithm. `overrides` are those of a command
    line, `--algo.key value`.
    """
    tree = config.model_dump(mode="json", exclude_none=True)["orchestrator"]
    entries: list[Tree] = [entry for entry in tree["train"]["env"] if env in (None, entry["name"])]
    if not entries:
        there = ", ".join(entry.name for entry in config.orchestrator.train.env)
        raise ConfigError("the run does not train on it", key="--env", value=env, fix=f"It trains on {there}.")
    if kind is not None:
        for entry in entries:
            entry.pop("algo", None)
        tree["algo"] = {"type": kind}
    sections = [entry["algo"] for entry in entries if "algo" in entry]
    if len(sections) < len(entries):  # some inherit the algorithm of the run
        sections.append(tree["algo"])
    added: dict[int, Tree] = {}
    for section in sections:
        if length_penalty is not None:
            section["length_penalty"] = {"type": length_penalty}
        put_algorithm_keys(section, overrides)
        chosen = ALGORITHMS.chosen_section(section)  # validation reports an unknown type
        if length_penalty is not None and chosen is not None and "length_penalty" not in chosen.model_fields:
            added[id(section)] = section.pop("length_penalty")
    penalties = {
        entry["name"]: validate(_Penalty, {"length_penalty": penalty}, "command line")[0].length_penalty
        for entry in entries
        if (penalty := added.get(id(entry.get("algo", tree["algo"])))) is not None
    }
    whole = {**config.model_dump(mode="json", exclude_none=True), "orchestrator": tree}
    return validate(RunConfig, whole, "command line")[0], penalties


class _Penalty(Config):
    length_penalty: LengthPenaltyConfig


def check_rescorable(
    env: str, was: AlgorithmConfig, algo: AlgorithmConfig, penalty: LengthPenaltyConfig | None
) -> None:
    """Raise `ConfigError` if saved rollouts do not contain what the algorithm needs."""
    if penalty is not None and not algo.HAS_ADVANTAGES:
        fact = f"environment {env!r}: {algo.type} gives no credit that a length penalty could be added to"
        fix = "Leave it out, or choose another algorithm."
        raise ConfigError(fact, key="--length-penalty", value=penalty.type, fix=fix)
    if algo.type == "sft":
        fact = f"environment {env!r}: sft trains on what its teacher writes, and these rollouts are the policy's own"
        raise ConfigError(fact, key="--algo", value="sft", fix="opd learns from a teacher on the policy's own tokens.")
    source = was.sampling_source
    if source is not None:
        fact = f"its rollouts were sampled by {source.name}, not by the policy: no algorithm but sft can train on them"
        raise ConfigError(fact, key="--env", value=env, fix="Choose an environment whose rollouts the policy sampled.")
    if algo.hints_policy:
        raise ConfigError(
            f"environment {env!r}: {algo.type} needs the logprobs of the policy of that time, which is gone",
            key="--algo.teacher",
            value="policy",
            fix="Give a frozen teacher, for example a checkpoint of the run that `headrace export` wrote and `headrace "
            "serve` serves: --algo.teacher.name NAME --algo.teacher.base_url http://host:port/v1",
        )


def describe_all(algorithms: Algorithms, penalties: Penalties) -> str:
    """Return the algorithms in words, by environment if they differ."""
    words = {name: describe(algo, penalties.get(name)) for name, algo in algorithms.items()}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{name}: {word}" for name, word in words.items())


def describe(algo: AlgorithmConfig, added: LengthPenaltyConfig | None = None) -> str:
    """Return the type of an algorithm and its settings that are not default."""
    settings = algo.model_dump(mode="json", exclude_defaults=True, exclude={"type", "length_penalty", "teacher"})
    words = [f"{key} = {value}" for key, value in settings.items()]
    penalty = added or getattr(algo, "length_penalty", None)
    if penalty is not None:
        changed = penalty.model_dump(mode="json", exclude_defaults=True, exclude={"type"})
        words.insert(0, " ".join([f"{penalty.type} length penalty", *(f"{k} = {v}" for k, v in changed.items())]))
    teacher = getattr(algo, "teacher", None)
    if isinstance(teacher, FrozenModelConfig):
        words.insert(0, f"teacher {teacher.name}")
    return f"{algo.type} ({', '.join(words)})" if words else algo.type


def short_name(algo: AlgorithmConfig, added: LengthPenaltyConfig | None = None) -> str:
    """Return the name of an algorithm for a file name."""
    penalty = added or getattr(algo, "length_penalty", None)
    name = algo.type.rpartition(":")[2]
    return name if penalty is None else f"{name}-{penalty.type}"
