"""Rename keys of other systems to the names of Headrace, before a short run file is validated."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from headrace.config.base import Tree
from headrace.config.shorthand import renamed, spelled_out, united
from headrace.errors import BadInput, InvalidValue
from headrace.runfile.foreign_keys import HINTS, fold_habits
from headrace.runfile.hackable.trainer import GENERATION, LOGGING, NEEDLESS, OTHER_NAMES, TYPED

MODEL_NAMES = {"name_or_path": "name", "model_name_or_path": "name", "torch_dtype": "dtype"}
GENERATION_NAMES = {"max_completion_length": "max_new_tokens", "max_prompt_length": "max_prompt_tokens"}
OTHER_MODEL_NAMES = tuple(f"model.{other}" for other, name in MODEL_NAMES.items() if name == "name")
BATCH_SIZES = ("trainer.batch_size", "trainer.train_batch_size", "trainer.per_device_train_batch_size")
ALTERNATIVES: tuple[tuple[str, ...], ...] = (
    ("objective.name", "objective.class_path"),
    ("objective.kwargs.stage2_start_epoch", "objective.kwargs.stage2_start_step"),
    ("data.provider", "data.class_path"),
    ("data.eval.provider", "data.eval.class_path"),
    ("data.eval.interval", "trainer.eval_steps", "orchestrator.eval.interval"),
    ("trainer.max_steps", "trainer.num_train_epochs"),
    ("trainer.run_name", "storage.run_name"),
    ("trainer.warmup_steps", "trainer.warmup_ratio", "trainer.scheduler.warmup_steps"),
    ("trainer.lr_scheduler_type", "trainer.lr_scheduler", "trainer.scheduler.type"),
    ("trainer.bf16", "model.dtype", "model.torch_dtype"),
    ("trainer.gradient_checkpointing", "trainer.activation_checkpointing"),
    ("trainer.epsilon", "trainer.loss.eps_low"),
    ("trainer.epsilon_high", "trainer.loss.eps_high"),
    ("trainer.use_vllm", "inference.engine"),
    ("generation.num_generations", "trainer.num_generations", "orchestrator.group_size"),
    *((f"trainer.{name}", path) for name, path in TYPED.items() if name not in ("learning_rate", "warmup_steps")),
    ("trainer.learning_rate", "trainer.lr", "trainer.optim.lr"),
    *(
        (
            f"generation.{name}",
            *(f"generation.{old}" for old, new in GENERATION_NAMES.items() if new == name),
            f"trainer.{other}",
        )
        for other, name in GENERATION.items()
        if name != "num_generations"
    ),
)
"""Groups of keys, of the short form and of the run file, that set the same thing: only one of a group may be set."""
NEUTRAL = {"do_sample": (True,), "repetition_penalty": (1, 1.0)}
"""Keys of `generation` that have no counterpart, with the values at which they change nothing."""


def rename_keys(tree: Tree) -> tuple[Tree, list[str]]:
    """Return the tree with one name for each key, and notices about keys that are ignored."""
    notices = fold_habits(tree)
    if isinstance(tree.get("model"), str | dict):
        tree["model"] = _renamed(spelled_out(tree["model"], "name"), MODEL_NAMES, "model")
    if isinstance(tree.get("trainer"), dict):
        trainer = _renamed(tree["trainer"], OTHER_NAMES, "trainer")
        for names, reason in ((LOGGING, "every step is logged"), (NEEDLESS, "there is nothing like it here")):
            if ignored := [name for name in names if name in trainer]:
                notices.append(f"{', '.join(f'trainer.{name}' for name in ignored)}: ignored, since {reason}.")
        trainer = {key: value for key, value in trainer.items() if key not in (*LOGGING, *NEEDLESS)}
        if isinstance(trainer.get("scheduler"), str):
            trainer = renamed(trainer, "scheduler", "lr_scheduler_type", "trainer.")
        for other in [other for other in GENERATION if other in trainer]:
            name, value = GENERATION[other], trainer.pop(other)
            generation = table_at(tree, "generation")
            united(generation.get(name, value), value, f"generation.{name}", f"trainer.{other}")
            tree["generation"] = {**generation, name: value}
        tree["trainer"] = trainer
    if isinstance(tree.get("generation"), dict):
        generation = _renamed(tree["generation"], GENERATION_NAMES, "generation")
        for name, neutral in NEUTRAL.items():
            value = generation.pop(name, None)
            if value is not None and value not in neutral:
                fact = "sampling has no such setting"
                raise InvalidValue(fact, key=f"generation.{name}", value=value, fix="Leave it out.")
        tree["generation"] = generation
    return tree, notices


def _renamed(table: Tree, names: dict[str, str], section: str) -> Tree:
    for other, name in names.items():
        if other in table:
            table = renamed(table, other, name, f"{section}.")
    return table


def unknown_keys(table: Tree, known: Collection[str], section: str = "") -> list[BadInput]:
    """Return an error for each key of a table that is not among `known`."""
    problems = []
    for name in table:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            fix = HINTS.get(name) or (f"Did you mean {section}{close[0]}?" if close else None)
            problems.append(BadInput("unknown key", key=f"{section}{name}", fix=fix))
    return problems


def table_at(tree: Tree, *path: str) -> Tree:
    """Return the table at a path; an empty one where there is none."""
    node: Any = tree
    for key in path:
        node = node.get(key, {}) if isinstance(node, dict) else {}
    return node if isinstance(node, dict) else {}
