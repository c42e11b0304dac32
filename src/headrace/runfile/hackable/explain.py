"""Explain the kwargs of data providers, rewards and objectives: type, default and description.

Types and defaults are read from the plugin's signature, so that a user's own plugins are explained, too;
`SENTENCES` has the descriptions of the shipped ones.
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
        known = sorted({known for plugin in plugins for known in plugin.parameters})
        close = difflib.get_close_matches(name, known, n=1)
        raise ConfigError("unknown key", key=key, fix=f"Did you mean {table}.{close[0]}?" if close else None)
    return [entry._replace(kinds=tuple(names) if len(plugins) > 1 else ()) for entry, names in merged.items()]


def kwargs_under(root: type[Config], key: str, tree: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the kwargs of the plugin whose table this is, with descriptions; nothing if it may be one of several."""
    plugins = _plugins(key, tree) if root is HackableConfig else []
    if len(plugins) != 1:
        return []
    return [(name, _explained(plugins[0], p).sentence) for name, p in plugins[0].parameters.items()]


def _plugins(table: str, tree: dict[str, Any] | None) -> list[Plugin]:
    """Return the plugins whose kwargs this table holds: the one that the file names, else all registered ones."""
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
    """Describe the type of a parameter; its annotation as written if a name in that cannot be resolved."""
    found = plugin.registry.find(plugin.name)
    try:
        hints = get_type_hints(found.__init__ if isinstance(found, type) else found)  # type: ignore[misc]
    except (NameError, TypeError):
        hints = {}
    if parameter.name in hints:
        return words_of(hints[parameter.name])
    return "anything" if parameter.annotation is inspect.Parameter.empty else str(parameter.annotation)
