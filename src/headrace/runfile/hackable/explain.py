"""What a kwarg of a data provider, a reward or an objective takes, and what it is unless somebody sets it.

Read off the plugin's signature, so that a user's own plugins are explained, too; sentences are kept here for those that
ship.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any, get_type_hints

from headrace.config.base import Config, ConfigError
from headrace.runfile.explain import Explanation, value_words, words_of
from headrace.runfile.hackable.plugins import Plugin, objective_named, provider_named, reward_named
from headrace.runfile.hackable.sections import HackableConfig

SENTENCES = {
    "additional_rewards": "Further rewards, added as they are: registered names or import paths.",
    "beta": "What thinking longer than the base model costs, or earns.",
    "cache_dir": "Where a tokenizer is looked for, and kept if it comes from the hub.",
    "columns": "What the columns of the data are to us: `question`, `answer`.",
    "correctness_reward": "The reward that says what is right.",
    "correctness_weight": "Weight of correctness in the weighted mode.",
    "count_malformed": "Whether the mean length of a group counts malformed completions, with a length of 0.",
    "digits": "Digits of the numbers that are added.",
    "enable_length_penalty": "Whether brevity counts; unset: in the weighted mode alone.",
    "enable_token_utilisation": "Whether token utilisation counts.",
    "family": "The family of reasoning-gym.",
    "group_size": "Completions of a group; unset: those in a row whose prompts are equal.",
    "gsm8k_source": "GSM8K: a file, a directory or a dataset.",
    "instructions": 'Words before the question; unset: those that ask for the strict format; "" for none.',
    "length_penalty_interaction": "What the weight of brevity is multiplied with: c*l, or c*l*f.",
    "length_penalty_lambda": "Weight of brevity in the weighted mode.",
    "levels": "Levels of MATH that are taken; unset: all.",
    "limit": "The first so many samples; unset: all.",
    "math_source": "MATH: a file, a directory or a dataset.",
    "name": "The dataset's name on the hub, or the directory where it was saved.",
    "non_strict_penalty": "What a completion gets that the gate stops.",
    "num_tasks": "How many are made up.",
    "operations": "Which of + - * are asked for.",
    "order": '"interleaved": spread evenly; "sequential": one after another; or "shuffled" together.',
    "part": 'What the reward sees: "all", or what is boxed alone, "answer".',
    "path": "A JSONL or Parquet file, or a directory of them.",
    "processes": "Processes that do algebra.",
    "providers": "A list of {provider, kwargs, share, order_by}: where the samples come from.",
    "reward_mode": '"additive", or "weighted_length_penalty".',
    "seed": "What decides every random choice; unset: the run's.",
    "settings": "The family's own settings.",
    "shuffle": "Whether the order is random.",
    "source": "A file, a directory or a dataset.",
    "split": "The part of the data.",
    "stage2_length_penalty_lambda": "Weight of brevity in the second stage.",
    "stage2_start_epoch": "Passes over the data after which the second stage begins.",
    "stage2_start_step": "Optimizer steps after which the second stage begins.",
    "strict_format_gate": "Whether a completion that is not in the strict format gets `non_strict_penalty` alone.",
    "subjects": "Subjects of MATH that are taken; unset: all.",
    "subset": "Of the dataset, where it has several.",
    "symbolic": "Whether algebra decides what numbers cannot.",
    "tags": "The pair around the thoughts; unset: <think> and </think>.",
    "timeout": "Seconds that one comparison, request or program may take.",
    "tokenizer_name": 'Whose tokens are counted; unset: those of the run\'s model; "" for words.',
    "zero_shot_path": "What the base model made of each example: JSONL of `key`, `correct` and `thinking_tokens`.",
}


def explain_kwarg(root: type[Config], key: str, tree: dict[str, Any] | None) -> list[Explanation]:
    """What there is to say about a kwarg, once for all plugins that have it alike; nothing about any other key."""
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
        known = sorted({known for plugin in plugins for known in plugin.parameters})
        close = difflib.get_close_matches(name, known, n=1)
        raise ConfigError("unknown key", key=key, fix=f"Did you mean {table}.{close[0]}?" if close else None)
    return [entry._replace(kinds=tuple(names) if len(plugins) > 1 else ()) for entry, names in merged.items()]


def kwargs_under(root: type[Config], key: str, tree: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The kwargs of the one plugin whose table this is, each with a sentence; none where it could be any of several."""
    plugins = _plugins(key, tree) if root is HackableConfig else []
    if len(plugins) != 1:
        return []
    return [(name, _explained(plugins[0], p).sentence) for name, p in plugins[0].parameters.items()]


def _plugins(table: str, tree: dict[str, Any] | None) -> list[Plugin]:
    """Those whose kwargs stand in this table: the one that the file names, or any of those that are registered."""
    from headrace.environments.hackable.registry import DATA_PROVIDERS, OBJECTIVES
    from headrace.environments.rewards.registry import REWARDS

    written = {name: section for name, section in (tree or {}).items() if name in ("objective", "data")}
    given = HackableConfig.model_validate(written)
    match table.split(".", 2):
        case ["objective", "kwargs"]:
            named = given.objective.class_path or given.objective.name
            return [objective_named(name) for name in ([named] if named else OBJECTIVES.names)]
        case ["data", "kwargs"] | ["data", "eval", "kwargs"]:
            chosen = given.data.chosen
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
    """In words; as it is written, where that names what cannot be found."""
    found = plugin.registry.find(plugin.name)
    try:
        hints = get_type_hints(found.__init__ if isinstance(found, type) else found)  # type: ignore[misc]
    except (NameError, TypeError):
        hints = {}
    if parameter.name in hints:
        return words_of(hints[parameter.name])
    return "anything" if parameter.annotation is inspect.Parameter.empty else str(parameter.annotation)
