"""Check and explain the plugins of a short run file and their kwargs. Problems name the key that the user wrote.

Types and defaults are read from the plugin's signature. The user's own code is imported and the objective is
constructed; data is read only to count its samples.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from headrace.config.base import Config, ConfigError
from headrace.config.launch import without_exported
from headrace.errors import BadInput, suggest_similar
from headrace.runfile.explain import Explanation, value_words, words_of
from headrace.runfile.hackable.sections import HackableConfig

if TYPE_CHECKING:
    from headrace.environments.hackable.registry import Objective
    from headrace.environments.registry import PluginRegistry

Kwargs = dict[str, Any]
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
PLAIN = {"int", "float", "bool", "None", "Optional", "NoneType"}
WORDS_IF_NULL = "tokenizer_name"
"""The kwarg for which null has a meaning: count words, not tokens of the run's model."""
FILLED = frozenset({"tokenizer_name", "seed"})
"""Kwargs that the run fills in."""


class Plugin(NamedTuple):
    """A plugin of a run file."""

    registry: PluginRegistry
    name: str
    key: str
    """The key of its kwargs: `objective.kwargs`."""

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return self.registry.options(self.name)


def objective_named(name: str) -> Plugin:
    from headrace.environments.hackable.registry import OBJECTIVES

    return Plugin(OBJECTIVES, name, "objective.kwargs")


def provider_named(name: str, key: str = "data.kwargs") -> Plugin:
    from headrace.environments.hackable.registry import DATA_PROVIDERS

    return Plugin(DATA_PROVIDERS, name, key)


def reward_named(name: str) -> Plugin:
    from headrace.environments.rewards.base import REWARDS

    return Plugin(REWARDS, name, f"rewards.kwargs.{name}")


def check_kwargs(plugin: Plugin, kwargs: Mapping[str, Any], problems: list[BadInput], *, needed: bool = True) -> Kwargs:
    """Return kwargs without nulls, with texts read as the numbers or booleans that the plugin takes.

    Unknown kwargs, and if `needed` missing ones, are added to `problems`. A null that has a meaning becomes an empty
    text, since TOML has no null.
    """
    parameters, noun = plugin.parameters, plugin.registry.what
    accepted = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    values = {name: v for name, v in kwargs.items() if v is not None or (name == WORDS_IF_NULL and name in accepted)}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in [name for name in values if name not in accepted and not takes_any]:
        taken = f"{noun.capitalize()} {plugin.name!r} takes {', '.join(accepted) or 'no kwargs'}."
        fix = suggest_similar(name, accepted, taken, prefix=f"{plugin.key}.")
        problems.append(BadInput("unknown key", key=f"{plugin.key}.{name}", fix=fix))
    for name in accepted if needed else ():
        if parameters[name].default is inspect.Parameter.empty and name not in {*values, *FILLED}:
            fact = f"required by {noun} {plugin.name!r}, and not set"
            problems.append(BadInput(fact, key=f"{plugin.key}.{name}"))
    for name, value in values.items():
        if value is None:
            values[name] = ""
        elif isinstance(value, str) and name in parameters:
            values[name] = read_as(kinds_of(parameters[name]), value)
    return values


def kinds_of(parameter: inspect.Parameter) -> set[str]:
    """Return the plain types of a parameter, by its annotation or its default; empty if it also takes other types."""
    annotation: Any = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return {type(parameter.default).__name__} & (PLAIN - {"NoneType"})
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    words = set(re.findall(r"\w+", text if "|" not in str(annotation) else str(annotation)))
    return words if words <= PLAIN else set()


def read_as(kinds: set[str], text: str) -> Any:
    """Return the number or boolean that a text stands for, else the text."""
    if "bool" in kinds and text.strip().lower() in WORDS:
        return WORDS[text.strip().lower()]
    for kind, read in (("int", int), ("float", float)):
        if kind in kinds:
            try:
                return read(text)
            except ValueError:
                continue
    return text


def construct_objective(plugin: Plugin, kwargs: Kwargs, problems: list[BadInput]) -> Objective | None:
    """Return the objective; None where its own checks refuse its kwargs."""
    from headrace.environments.hackable.registry import build_objective

    try:
        return build_objective(plugin.name, kwargs)
    except BadInput as error:
        cause = error.__cause__ if isinstance(error.__cause__, BadInput) else error
        name, _, fact = (cause.key, "", cause.fact) if cause.key else cause.fact.partition(" ")
        if name in kwargs:
            problems.append(BadInput(fact, key=f"{plugin.key}.{name}", value=kwargs[name], fix=cause.fix))
        else:
            problems.append(BadInput(cause.fact, key=plugin.key, fix=cause.fix))
        return None


def is_registered(plugin: Plugin, key: str, problems: list[BadInput]) -> bool:
    """Return whether the plugin exists; `key` is the one that names it."""
    try:
        plugin.registry.find(plugin.name)
    except BadInput as error:
        problems.append(BadInput(error.fact, key=key, value=plugin.name, fix=error.fix))
        return False
    return True


def count_samples(name: str, kwargs: Kwargs, seed: int, variables: Mapping[str, str]) -> int:
    """Count the samples of a provider under the environment variables of the run's processes."""
    from headrace.environments.hackable.registry import build_data_provider

    before = dict(os.environ)
    os.environ.update(without_exported(variables))
    try:
        return sum(1 for _ in build_data_provider(name, kwargs, seed))
    finally:
        os.environ.clear()
        os.environ.update(before)


def needs_hub(plugin: Plugin, kwargs: Mapping[str, Any], is_name: Callable[[str], bool]) -> bool:
    """Return whether a source of the plugin, set or default, is neither on this machine nor in its `cache_dir`."""
    values = {p.name: p.default for p in plugin.parameters.values()} | dict(kwargs)
    sources = [value for name, value in values.items() if is_name(name) and isinstance(value, str) and value]
    cache = Path(values.get("cache_dir") or ".")
    return any(not (Path(name).exists() or (cache / name).exists()) for name in sources)


SENTENCES = {
    "additional_rewards": "Further rewards, added as they are: registered names or import paths.",
    "beta": "Weight of thinking longer than the base model: a penalty if that was right, a bonus if it was wrong.",
    "cache_dir": "Where a tokenizer is looked for, and kept if it comes from the hub.",
    "columns": "The roles of the data's columns: `question`, `answer`.",
    "correctness_reward": "The reward that measures correctness.",
    "correctness_weight": "Weight of correctness in the weighted mode.",
    "count_malformed": "Whether the mean length of a group counts malformed completions, with a length of 0.",
    "digits": "Digits of the operands.",
    "enable_length_penalty": "Whether brevity counts; unset: in the weighted mode alone.",
    "enable_token_utilisation": "Whether token utilisation counts.",
    "family": "The family of reasoning-gym.",
    "group_size": "Completions per group; unset: consecutive completions with the same prompt are a group.",
    "gsm8k_source": "GSM8K: a file, a directory or a dataset.",
    "instructions": 'Text before the question; unset: a request for the strict format; "": no text.',
    "length_penalty_interaction": "What the weight of brevity is multiplied with: c*l, or c*l*f.",
    "length_penalty_lambda": "Weight of brevity in the weighted mode.",
    "levels": "Levels of MATH that are taken; unset: all.",
    "limit": "Use only the first this many samples; unset: all.",
    "math_source": "MATH: a file, a directory or a dataset.",
    "name": "The dataset's name on the hub, or the directory where it was saved.",
    "non_strict_penalty": "Reward of a completion that the strict format gate rejects.",
    "num_tasks": "Number of generated tasks.",
    "operations": "Which of + - * occur in the tasks.",
    "order": '"interleaved": spread evenly; "sequential": one after another; or "shuffled" together.',
    "part": 'What the reward sees: "all", or what is boxed alone, "answer".',
    "path": "A JSONL or Parquet file, or a directory of them.",
    "processes": "Processes for symbolic comparison.",
    "providers": "A list of {provider, kwargs, share, order_by}: where the samples come from.",
    "reward_mode": '"additive", or "weighted_length_penalty".',
    "rewards": "The rewards that are added up: registered names, import paths or files.",
    "seed": "Random seed; unset: that of the run.",
    "settings": "The family's own settings.",
    "shuffle": "Whether the order is random.",
    "source": "A file, a directory or a dataset.",
    "split": "The split of the data.",
    "stage2_length_penalty_lambda": "Weight of brevity in the second stage.",
    "stage2_start_epoch": "Passes over the data after which the second stage begins.",
    "stage2_start_step": "Optimizer steps after which the second stage begins.",
    "strict_format_gate": "Whether a completion that is not in the strict format gets `non_strict_penalty` alone.",
    "subjects": "Subjects of MATH that are taken; unset: all.",
    "subset": "Of the dataset, where it has several.",
    "symbolic": "Compare answers symbolically where a numeric comparison is not possible.",
    "tags": "The pair of tags around the thinking; unset: <think> and </think>.",
    "timeout": "Seconds that one comparison, request or program may take.",
    "tokenizer_name": 'Whose tokens are counted; unset: those of the run\'s model; "" for words.',
    "weights": "A factor for each of the rewards; unset: 1.",
    "zero_shot_path": "Results of the base model on each example: JSONL with `key`, `correct` and `thinking_tokens`.",
}


def explain_kwarg(root: type[Config], key: str, tree: dict[str, Any] | None) -> list[Explanation]:
    """Explain a kwarg, one entry for all plugins in which it is the same; return nothing for other keys."""
    if root is not HackableConfig:
        return []
    table, _, name = key.rpartition(".")
    plugins = _plugins(table, tree)
    if not plugins:
        return []
    merged: dict[Explanation, list[str]] = {}
    for plugin in plugins:
        if name in plugin.parameters:
            merged.setdefault(_explained(plugin, plugin.parameters[name]), []).append(plugin.name)
    if not merged:
        parameters = sorted({parameter for plugin in plugins for parameter in plugin.parameters})
        raise ConfigError("unknown key", key=key, fix=suggest_similar(name, parameters, prefix=f"{table}.") or None)
    return [entry._replace(kinds=tuple(names) if len(plugins) > 1 else ()) for entry, names in merged.items()]


def kwargs_under(root: type[Config], key: str, tree: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the kwargs of the plugin whose table this is, with descriptions; nothing if plugins differ in them."""
    plugins = _plugins(key, tree) if root is HackableConfig else []
    tables = {tuple((name, _explained(each, p).sentence) for name, p in each.parameters.items()) for each in plugins}
    return list(tables.pop()) if len(tables) == 1 else []


def _plugins(table: str, tree: dict[str, Any] | None) -> list[Plugin]:
    """Return the plugins whose kwargs this table holds: the one that is chosen, or every data provider."""
    from headrace.environments.hackable.registry import DATA_PROVIDERS
    from headrace.environments.rewards.base import REWARDS

    written = {name: section for name, section in (tree or {}).items() if name in ("objective", "data")}
    config = HackableConfig.model_validate(written)
    match table.split(".", 2):
        case ["objective", "kwargs"]:
            return [objective_named(config.objective.chosen)]
        case ["data", "kwargs"] | ["data", "eval", "kwargs"]:
            chosen = config.data.chosen
            return [provider_named(name) for name in ([chosen] if chosen else DATA_PROVIDERS.names)]
        case ["rewards", "kwargs", name] if ":" in name or name in REWARDS.names:
            return [reward_named(name)]
    return []


def _explained(plugin: Plugin, parameter: inspect.Parameter) -> Explanation:
    required = parameter.default is inspect.Parameter.empty
    default = "none: it must be set" if required else value_words(parameter.default)
    sentence = SENTENCES.get(parameter.name, f"A kwarg of {plugin.registry.what} {plugin.name}.")
    return Explanation((), _type(plugin, parameter), default, sentence)


def _type(plugin: Plugin, parameter: inspect.Parameter) -> str:
    """Describe the type of a parameter; its annotation as written if a name in that cannot be resolved."""
    target = plugin.registry.find(plugin.name)
    try:
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    except (NameError, TypeError):
        hints = {}
    if parameter.name in hints:
        return words_of(hints[parameter.name])
    return "anything" if parameter.annotation is inspect.Parameter.empty else str(parameter.annotation)
