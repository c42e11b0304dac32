"""From the names that Hugging Face trainers have for things to ours. Plain trees in, plain trees out."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection
from typing import Any

from headrace.config.base import Tree
from headrace.errors import BadInput, shown_value
from headrace.runfile.hackable.sections import NamedTrainerConfig
from headrace.runfile.reading import leaves, put

ADAMW = ("adamw", "adam", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_torch_xla")
SMALL_ADAMW = (
    "adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "paged_adamw", "paged_adamw_8bit",
    "paged_adamw_32bit",
)  # fmt: skip
"""AdamW with a state that takes less of the GPU's memory."""
OPTIMIZERS = {**dict.fromkeys((*ADAMW, *SMALL_ADAMW), "adamw"), "sgd": "sgd", "muon": "muon"}
SCHEDULERS = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "warmup_stable_decay": "wsd",
    "wsd": "wsd",
}
SCHEDULER_KWARGS = {"num_cycles": "cycles", "num_decay_steps": "decay_steps", "min_lr_rate": "min_factor"}
TRACKERS = ("wandb", "tensorboard")

OTHER_NAMES = {
    "lr": "learning_rate",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "train_batch_size": "batch_size",
    "permanent_checkpoint_steps": "permanent_save_steps",
}
"""What some call the keys of `NamedTrainerConfig`."""
GENERATION = {
    "num_generations": "num_generations",
    "max_completion_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
}
"""Keys of `generation` that some trainers have among their own."""
TYPED = {
    "learning_rate": "trainer.optim.lr",
    "weight_decay": "trainer.optim.weight_decay",
    "adam_epsilon": "trainer.optim.eps",
    "max_grad_norm": "trainer.optim.max_grad_norm",
    "torch_compile": "trainer.compile",
    "save_steps": "trainer.ckpt.interval",
    "save_total_limit": "trainer.ckpt.keep_last",
    "permanent_save_steps": "trainer.ckpt.permanent_interval",
    "warmup_steps": "trainer.scheduler.warmup_steps",
}
"""Keys of `NamedTrainerConfig` that are a key of a run file with the same value."""
LOGGING = ("logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_completions", "disable_tqdm")
NEEDLESS = (
    "dataloader_num_workers", "dataloader_pin_memory", "ddp_find_unused_parameters", "do_eval", "do_train",
    "eval_strategy", "evaluation_strategy", "group_by_length", "overwrite_output_dir", "per_device_eval_batch_size",
    "remove_unused_columns", "save_strategy",
)  # fmt: skip
"""Keys that have no counterpart and change nothing."""


class Written:
    """Keys of the typed tree, each with the key that the user wrote for it."""

    def __init__(self) -> None:
        self.tree: Tree = {}
        self.keys: dict[str, str] = {}

    def set(self, path: str, value: Any, key: str) -> None:
        put(self.tree, path.split("."), value)
        self.keys[path] = key


def without_needless(table: Tree) -> tuple[Tree, list[str]]:
    """The table without keys that say nothing here, and a notice about them."""
    notices = []
    for names, why in ((LOGGING, "every step is logged"), (NEEDLESS, "there is nothing like it here")):
        if given := [name for name in names if name in table]:
            notices.append(f"{', '.join(f'trainer.{name}' for name in given)}: ignored, since {why}.")
    return {key: value for key, value in table.items() if key not in (*LOGGING, *NEEDLESS)}, notices


def typed_trainer(
    given: NamedTrainerConfig, max_steps: int | None, problems: list[BadInput], notices: list[str]
) -> Written:
    """Its `trainer`, `model` and `inference` keys in the typed tree. `max_steps` are those of the run."""
    written = Written()
    for name, path in TYPED.items():
        if (value := getattr(given, name)) is not None:
            written.set(path, value, f"trainer.{name}")
    for part in (_optimizer, _scheduler, _loss, _precision):
        part(given, written, problems, notices)
    _warmup(given, written, max_steps, problems)
    if given.gradient_checkpointing is not None:
        value = "full" if given.gradient_checkpointing else False
        written.set("trainer.activation_checkpointing", value, "trainer.gradient_checkpointing")
    if given.use_vllm is not None:
        written.set("inference.engine", "vllm" if given.use_vllm else "embedded", "trainer.use_vllm")
    return written


def _optimizer(given: NamedTrainerConfig, written: Written, problems: list[BadInput], notices: list[str]) -> None:
    if isinstance(given.optim, str):
        kind = OPTIMIZERS.get(given.optim.lower())
        if kind is None:
            problems.append(_not_known("optimizer", "trainer.optim", given.optim, OPTIMIZERS))
        else:
            written.set("trainer.optim.type", kind, "trainer.optim")
        if given.optim.lower() in SMALL_ADAMW:
            notices.append(
                f"trainer.optim is {given.optim}: it is AdamW with a state in float32 on the GPU here; "
                "trainer.optim = {type: adamw, offload_state: true} keeps it in CPU memory."
            )
    betas = {name: getattr(given, name) for name in ("adam_beta1", "adam_beta2") if getattr(given, name) is not None}
    if betas:
        pair = [betas.get("adam_beta1", 0.9), betas.get("adam_beta2", 0.999)]
        written.set("trainer.optim.betas", pair, f"trainer.{next(iter(betas))}")
    if written.tree.get("trainer", {}).get("optim", {}).get("type") == "sgd":
        problems.extend(
            BadInput(
                "sgd has no such setting",
                key=f"trainer.{name}",
                value=getattr(given, name),
                fix="Leave it out, or set trainer.optim to adamw_torch.",
            )
            for name in (*betas, *(["adam_epsilon"] if given.adam_epsilon is not None else []))
        )


def _scheduler(given: NamedTrainerConfig, written: Written, problems: list[BadInput], notices: list[str]) -> None:
    if given.lr_scheduler_type is not None:
        kind = SCHEDULERS.get(given.lr_scheduler_type.lower())
        if kind is None:
            key = "trainer.lr_scheduler_type"
            problems.append(_not_known("schedule", key, given.lr_scheduler_type, SCHEDULERS))
            return
        written.set("trainer.scheduler.type", kind, "trainer.lr_scheduler_type")
    for name, value in given.lr_scheduler_kwargs.items():
        key = f"trainer.lr_scheduler_kwargs.{name}"
        if name == "min_lr" and given.learning_rate is not None:
            written.set("trainer.scheduler.min_factor", float(value) / given.learning_rate, key)
        elif name in SCHEDULER_KWARGS:
            written.set(f"trainer.scheduler.{SCHEDULER_KWARGS[name]}", value, key)
        else:
            known = ", ".join([*SCHEDULER_KWARGS, "min_lr (with trainer.learning_rate)"])
            problems.append(
                BadInput(
                    "unknown key", key=key, value=value, fix=f"There is {known}; all else is in trainer.scheduler."
                )
            )


def _warmup(given: NamedTrainerConfig, written: Written, max_steps: int | None, problems: list[BadInput]) -> None:
    if given.warmup_ratio is None:
        return
    if given.warmup_steps:
        problems.append(
            BadInput(
                f"trainer.warmup_steps is {given.warmup_steps}, and both say how long the warmup is",
                key="trainer.warmup_ratio",
                value=given.warmup_ratio,
                fix="Give one of the two.",
            )
        )
    elif max_steps is not None:
        steps = math.ceil(given.warmup_ratio * max_steps - 1e-9)  # .1 of 30 is 3, whatever floats make of it
        written.set("trainer.scheduler.warmup_steps", steps, "trainer.warmup_ratio")


def _loss(given: NamedTrainerConfig, written: Written, problems: list[BadInput], notices: list[str]) -> None:
    if given.beta:
        problems.append(
            BadInput(
                "there is no penalty for leaving the start model",
                key="trainer.beta",
                value=given.beta,
                fix="Set 0; trainer.loss.kl_tau weighs how far a step may leave the policy that sampled.",
            )
        )
    clip = {
        "eps_low": given.epsilon,
        "eps_high": given.epsilon_high if given.epsilon_high is not None else given.epsilon,
    }
    for name, value in clip.items():
        if value is not None:
            key = "trainer.epsilon_high" if given.epsilon_high is not None and name == "eps_high" else "trainer.epsilon"
            written.set("trainer.loss.type", "ppo_clip", key)
            written.set(f"trainer.loss.{name}", value, key)


def _precision(given: NamedTrainerConfig, written: Written, problems: list[BadInput], notices: list[str]) -> None:
    if given.fp16:
        problems.append(
            BadInput(
                "training in float16 is not supported",
                key="trainer.fp16",
                value=True,
                fix="Set trainer.bf16, or leave both out.",
            )
        )
    elif given.bf16 is not None:
        written.set("model.dtype", "bfloat16" if given.bf16 else "float32", "trainer.bf16")


def trackers(given: NamedTrainerConfig, problems: list[BadInput]) -> dict[str, Tree]:
    """The sections that `report_to` stands for."""
    listed = [given.report_to] if isinstance(given.report_to, str) else given.report_to or []
    asked = [name for name in listed if name != "none"]
    problems.extend(
        _not_known("tracker", "trainer.report_to", name, (*TRACKERS, "none")) for name in asked if name not in TRACKERS
    )
    return {name: {} for name in asked if name in TRACKERS}


def contradictions(written: Written, explicit: Tree) -> list[BadInput]:
    """Return an error for each key that was written under both of its names, with different values."""
    both = leaves({"trainer": explicit.get("trainer", {}), "model": explicit.get("model", {})})
    mine = leaves(written.tree)
    return [
        BadInput(
            f"another name of {path}, which is {shown_value(value)}",
            key=written.keys[path],
            value=mine[path],
            fix="Give one of them.",
        )
        for path, value in both.items()
        if path in written.keys and not _same(mine[path], value)
    ]


def _not_known(what: str, key: str, given: str, known: Collection[str]) -> BadInput:
    close = difflib.get_close_matches(given, known, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    return BadInput(f"unknown {what}", key=key, value=given, fix=f"{hint}Known: {', '.join(known)}.")


def _same(one: Any, other: Any) -> bool:
    readers: tuple[Callable[[Any], Any], ...] = (float, str)
    for read in readers:
        try:
            return bool(read(one) == read(other))
        except (TypeError, ValueError):
            continue
    return False
