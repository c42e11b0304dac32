"""Translate keys of other systems, such as Hugging Face trainers, into those of a run file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from headrace.config.base import Tree, as_table, merge_names, rename_key
from headrace.errors import BadInput, InvalidValue, shown_value, suggest_similar
from headrace.runfile.foreign_keys import HINTS, replace_foreign_keys
from headrace.runfile.hackable.sections import NamedTrainerConfig
from headrace.runfile.reading import leaves, put, table_at

ADAMW = ("adamw", "adam", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_torch_xla")
SMALL_ADAMW = (
    "adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "paged_adamw", "paged_adamw_8bit",
    "paged_adamw_32bit",
)  # fmt: skip
"""Variants of AdamW whose state takes less GPU memory."""
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
TRACKERS = ("wandb", "tensorboard", "trackio")

OTHER_NAMES = {
    "lr": "learning_rate",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "train_batch_size": "batch_size",
    "permanent_checkpoint_steps": "permanent_save_steps",
}
"""Other names of keys of `NamedTrainerConfig`."""
GENERATION = {
    "num_generations": "num_generations",
    "max_completion_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
}
"""Keys of `trainer` in other systems, each with its name in `generation`."""
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
"""Keys of `NamedTrainerConfig`, each with the key of a run file that takes the same value."""
LOGGING = ("logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_completions", "disable_tqdm")
NEEDLESS = (
    "dataloader_num_workers", "dataloader_pin_memory", "ddp_find_unused_parameters", "do_eval", "do_train",
    "eval_strategy", "evaluation_strategy", "group_by_length", "overwrite_output_dir", "per_device_eval_batch_size",
    "remove_unused_columns", "save_strategy",
)  # fmt: skip
"""Keys without a counterpart, which are ignored with a notice."""
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
    ("trainer.beta", "orchestrator.algo.kl.coef"),
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
    notices = replace_foreign_keys(tree)
    if isinstance(tree.get("model"), str | dict):
        tree["model"] = _rename_keys(as_table(tree["model"], "name"), MODEL_NAMES, "model")
    if isinstance(tree.get("trainer"), dict):
        trainer = _rename_keys(tree["trainer"], OTHER_NAMES, "trainer")
        for names, reason in ((LOGGING, "every step is logged"), (NEEDLESS, "there is nothing like it here")):
            if ignored := [name for name in names if name in trainer]:
                notices.append(f"{', '.join(f'trainer.{name}' for name in ignored)}: ignored, since {reason}.")
        trainer = {key: value for key, value in trainer.items() if key not in (*LOGGING, *NEEDLESS)}
        if isinstance(trainer.get("scheduler"), str):
            trainer = rename_key(trainer, "scheduler", "lr_scheduler_type", "trainer.")
        for other in [other for other in GENERATION if other in trainer]:
            name, value = GENERATION[other], trainer.pop(other)
            generation = table_at(tree, "generation")
            merge_names(generation.get(name, value), value, f"generation.{name}", f"trainer.{other}")
            tree["generation"] = {**generation, name: value}
        tree["trainer"] = trainer
    if isinstance(tree.get("generation"), dict):
        generation = _rename_keys(tree["generation"], GENERATION_NAMES, "generation")
        for name, neutral in NEUTRAL.items():
            value = generation.pop(name, None)
            if value is not None and value not in neutral:
                fact = "sampling has no such setting"
                raise InvalidValue(fact, key=f"generation.{name}", value=value, fix="Leave it out.")
        tree["generation"] = generation
    return tree, notices


def _rename_keys(table: Tree, names: dict[str, str], section: str) -> Tree:
    for other, name in names.items():
        if other in table:
            table = rename_key(table, other, name, f"{section}.")
    return table


def unknown_keys(table: Tree, allowed: Collection[str], section: str = "") -> list[BadInput]:
    """Return an error for each key of a table that is not among `allowed`."""
    problems = []
    for name in table:
        if name not in allowed:
            fix = HINTS.get(name) or suggest_similar(name, allowed, prefix=section) or None
            problems.append(BadInput("unknown key", key=f"{section}{name}", fix=fix))
    return problems


class Translated:
    """A tree of the run file under construction; `keys` maps each of its keys to the key that the user wrote."""

    def __init__(self) -> None:
        self.tree: Tree = {}
        self.keys: dict[str, str] = {}

    def set(self, path: str, value: Any, key: str) -> None:
        put(self.tree, path.split("."), value)
        self.keys[path] = key


def translate_trainer(
    config: NamedTrainerConfig, max_steps: int | None, problems: list[BadInput], notices: list[str]
) -> Translated:
    """Return the `trainer`, `model` and `inference` keys of the run file; `max_steps` is that of the run."""
    result = Translated()
    for name, path in TYPED.items():
        if (value := getattr(config, name)) is not None:
            result.set(path, value, f"trainer.{name}")
    _optimizer(config, result, problems, notices)
    _scheduler(config, result, max_steps, problems)
    _loss(config, result)
    if config.fp16:
        fix = "Set trainer.bf16, or leave both out."
        problems.append(BadInput("training in float16 is not supported", key="trainer.fp16", value=True, fix=fix))
    elif config.bf16 is not None:
        result.set("model.dtype", "bfloat16" if config.bf16 else "float32", "trainer.bf16")
    if config.gradient_checkpointing is not None:
        value = "full" if config.gradient_checkpointing else False
        result.set("trainer.activation_checkpointing", value, "trainer.gradient_checkpointing")
    if config.use_vllm is not None:
        result.set("inference.engine", "vllm" if config.use_vllm else "embedded", "trainer.use_vllm")
    return result


def _optimizer(config: NamedTrainerConfig, result: Translated, problems: list[BadInput], notices: list[str]) -> None:
    if isinstance(config.optim, str):
        kind = OPTIMIZERS.get(config.optim.lower())
        if kind is None:
            problems.append(_unknown("optimizer", "trainer.optim", config.optim, OPTIMIZERS))
        else:
            result.set("trainer.optim.type", kind, "trainer.optim")
        if config.optim.lower() in SMALL_ADAMW:
            notices.append(
                f"trainer.optim is {config.optim}: it is AdamW with a state in float32 on the GPU here; "
                "trainer.optim = {type: adamw, offload_state: true} keeps it in CPU memory."
            )
    own = ("adam_beta1", "adam_beta2", "adam_epsilon")
    adam = {name: value for name in own if (value := getattr(config, name)) is not None}
    if betas := [name for name in adam if name != "adam_epsilon"]:
        pair = [adam.get("adam_beta1", 0.9), adam.get("adam_beta2", 0.999)]
        result.set("trainer.optim.betas", pair, f"trainer.{betas[0]}")
    if result.tree.get("trainer", {}).get("optim", {}).get("type") == "sgd":
        fix = "Leave it out, or set trainer.optim to adamw_torch."
        for name, value in adam.items():
            problems.append(BadInput("sgd has no such setting", key=f"trainer.{name}", value=value, fix=fix))


def _scheduler(config: NamedTrainerConfig, result: Translated, max_steps: int | None, problems: list[BadInput]) -> None:
    ratio = config.warmup_ratio
    if ratio is not None and config.warmup_steps:
        fact = f"trainer.warmup_steps = {config.warmup_steps} also sets the length of the warmup"
        problems.append(BadInput(fact, key="trainer.warmup_ratio", value=ratio, fix="Give one of the two."))
    elif ratio is not None and max_steps is not None:
        steps = math.ceil(ratio * max_steps - 1e-9)  # a rounding error of floats must not add a step
        result.set("trainer.scheduler.warmup_steps", steps, "trainer.warmup_ratio")
    if config.lr_scheduler_type is not None:
        kind = SCHEDULERS.get(config.lr_scheduler_type.lower())
        if kind is None:
            key = "trainer.lr_scheduler_type"
            problems.append(_unknown("schedule", key, config.lr_scheduler_type, SCHEDULERS))
            return
        result.set("trainer.scheduler.type", kind, "trainer.lr_scheduler_type")
    for name, value in config.lr_scheduler_kwargs.items():
        key = f"trainer.lr_scheduler_kwargs.{name}"
        if name == "min_lr" and config.learning_rate is not None:
            result.set("trainer.scheduler.min_factor", float(value) / config.learning_rate, key)
        elif name in SCHEDULER_KWARGS:
            result.set(f"trainer.scheduler.{SCHEDULER_KWARGS[name]}", value, key)
        else:
            fix = f"Known: {', '.join(SCHEDULER_KWARGS)}, min_lr (with trainer.learning_rate); or trainer.scheduler."
            problems.append(BadInput("unknown key", key=key, value=value, fix=fix))


def _loss(config: NamedTrainerConfig, result: Translated) -> None:
    if config.beta is not None:
        result.set("orchestrator.algo.kl.coef", config.beta, "trainer.beta")
    high = "epsilon" if config.epsilon_high is None else "epsilon_high"
    for name, source in (("eps_low", "epsilon"), ("eps_high", high)):
        if (value := getattr(config, source)) is not None:
            result.set("trainer.loss.type", "ppo_clip", f"trainer.{source}")
            result.set(f"trainer.loss.{name}", value, f"trainer.{source}")


def trackers(config: NamedTrainerConfig, problems: list[BadInput]) -> dict[str, Tree]:
    """Return an empty section for each tracker of `report_to`."""
    listed = [config.report_to] if isinstance(config.report_to, str) else config.report_to or []
    names = [name for name in listed if name != "none"]
    problems.extend(
        _unknown("tracker", "trainer.report_to", name, (*TRACKERS, "none")) for name in names if name not in TRACKERS
    )
    return {name: {} for name in names if name in TRACKERS}


def contradictions(result: Translated, explicit: Tree) -> list[BadInput]:
    """Return an error for each key that is set under both of its names, with different values."""
    both = leaves({section: explicit.get(section, {}) for section in ("trainer", "model", "orchestrator")})
    mine = leaves(result.tree)
    problems = []
    for path, value in both.items():
        if path in result.keys and not _same(mine[path], value):
            fact = f"another name of {path}, which is {shown_value(value)}"
            problems.append(BadInput(fact, key=result.keys[path], value=mine[path], fix="Give one of them."))
    return problems


def _unknown(noun: str, key: str, value: str, names: Collection[str]) -> BadInput:
    fix = suggest_similar(value, names, f"Known: {', '.join(names)}.")
    return BadInput(f"unknown {noun}", key=key, value=value, fix=fix)


def _same(one: Any, other: Any) -> bool:
    readers: tuple[Callable[[Any], Any], ...] = (float, str)
    for read in readers:
        try:
            return bool(read(one) == read(other))
        except (TypeError, ValueError):
            continue
    return False
