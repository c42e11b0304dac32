"""Sections of the short run file (docs/how-to/hacking.md), which `translation.py` translates into a run file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

from headrace.config.base import Config
from headrace.errors import InvalidValue

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TOKEN = re.compile(r"hf_\w{20,}|[0-9a-fA-F]{40,}")


def _name_of_variable(name: str) -> str:
    """Refuse a token in place of a name; the error does not show it."""
    if VARIABLE.fullmatch(name) is None or TOKEN.fullmatch(name) is not None:
        fix = "Put the token into a variable, and write the name of the variable here. "
        fix += "A token that was shared with this file is to be replaced by a new one."
        raise InvalidValue("not the name of an environment variable", fix=fix)
    return name


VariableName = Annotated[str, AfterValidator(_name_of_variable)]


class _PluginConfig(Config):
    """A name or an import path, and what the plugin is called with."""

    class_path: str | None = None
    """Your own, as `package.module:Name`, instead of a registered name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the plugin."""

    def name_problems(self, other: str) -> Iterator[InvalidValue]:
        """Yield what is wrong with `class_path`, of which `other` is the alternative."""
        if self.class_path is not None and getattr(self, other) is not None:
            yield self.invalid("class_path", f"{other} is set, too", f"Give {other} or class_path.")
        if self.class_path is not None and ":" not in self.class_path:
            yield self.invalid("class_path", "not an import path", "Write package.module:Name.")


class ObjectiveConfig(_PluginConfig):
    """The objective: which rewards are computed, and how they are combined."""

    name: str | None = None
    """A registered objective; unset: `token_grpo`."""

    def problems(self) -> Iterator[InvalidValue]:
        return self.name_problems("name")

    @property
    def chosen(self) -> str:
        return self.class_path or self.name or "token_grpo"


class RewardsConfig(Config):
    """Arguments of the objective's rewards."""

    kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Kwargs by reward. Rewards that count tokens use the run's model, unless `tokenizer_name` is set."""
    timeout: float = Field(60.0, gt=0)
    """Timeout in seconds of a reward for one group."""


class GenerationConfig(Config):
    """How completions are sampled."""

    num_generations: int | None = Field(None, ge=1)
    """Completions per prompt, which form a group; unset: 8."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Most tokens per completion; unset: 512, or what `seq_len` leaves."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Tokens reserved for the prompt, where `seq_len` is not set; unset: 512."""
    temperature: float | None = Field(None, gt=0)
    """Sampling temperature; unset: 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the most likely tokens with this total probability; unset: from all."""
    top_k: int | None = Field(None, ge=-1)
    """Sample from this many most likely tokens; unset, 0 and -1: from all."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Sample from tokens with at least this probability relative to the most likely one; unset: from all."""


class EvalDataConfig(_PluginConfig):
    """Evaluation data."""

    provider: str | None = None
    """A registered data provider; unset: that of training, with its kwargs, which those of this section change."""
    interval: int | None = Field(None, ge=1)
    """Steps between evaluations; unset: 100."""
    num_examples: int | None = Field(None, ge=1)
    """Use only the first this many samples; unset: all."""
    num_generations: int | None = Field(None, ge=1)
    """Completions per prompt; unset: 1."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Most tokens per completion; unset: as in training."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature, 0: greedy; unset: as in training."""
    top_p: float | None = Field(None, gt=0, le=1)
    """As in `generation`; unset: as in training."""
    top_k: int | None = Field(None, ge=-1)
    """As in `generation`; unset: as in training."""
    min_p: float | None = Field(None, ge=0, le=1)
    """As in `generation`; unset: as in training."""

    def problems(self) -> Iterator[InvalidValue]:
        return self.name_problems("provider")


class DataConfig(_PluginConfig):
    """Training data."""

    provider: str | None = None
    """A registered data provider."""
    ratio: float | None = Field(None, gt=0)
    """Relative share of drawn tasks, if `orchestrator.train.env` has further environments with a ratio."""
    eval: EvalDataConfig | None = None
    """Evaluation data; unset: no evaluation."""

    def problems(self) -> Iterator[InvalidValue]:
        return self.name_problems("provider")

    @property
    def chosen(self) -> str | None:
        return self.class_path or self.provider


class StorageConfig(Config):
    """The storage root of datasets, models and runs."""

    cache_dir: Path | None = None
    """The root: `datasets/`, `models/`, `hf/`, `artifacts/`, `logs/wandb/`; unset: the working directory."""
    run_name: str | None = Field(None, min_length=1)
    """The run's directory in `artifacts/runs/`; unset: the name of the file."""
    offline: bool | None = None
    """Do not use the hub and W&B; unset: the hub is not used if everything in the file is on this machine. Exported
    `HF_HUB_OFFLINE` and `WANDB_MODE` take precedence."""


class AuthConfig(Config):
    """Names of environment variables, never tokens."""

    hf_token: VariableName = "HF_TOKEN"
    """The variable that holds the Hugging Face token."""
    wandb_api_key: VariableName = "WANDB_API_KEY"
    """The variable that holds the key of Weights & Biases."""


class NamedTrainerConfig(Config):
    """Keys of `trainer` by the names that Hugging Face trainers have for them; all others are those of a run file."""

    model_config = ConfigDict(extra="allow")

    learning_rate: float | None = Field(None, gt=0)
    """`trainer.optim.lr`."""
    optim: str | dict[str, Any] | None = None
    """`adamw_torch` and its like, `sgd`, `muon`; or the table `trainer.optim`."""
    weight_decay: float | None = Field(None, ge=0)
    """`trainer.optim.weight_decay`."""
    adam_beta1: float | None = Field(None, ge=0, lt=1)
    """The first of `trainer.optim.betas`."""
    adam_beta2: float | None = Field(None, ge=0, lt=1)
    """The second of `trainer.optim.betas`."""
    adam_epsilon: float | None = Field(None, gt=0)
    """`trainer.optim.eps`."""
    max_grad_norm: float | None = Field(None, ge=0)
    """`trainer.optim.max_grad_norm`."""
    lr_scheduler_type: str | None = None
    """`linear`, `cosine`, `cosine_with_restarts`, `constant`, `constant_with_warmup`, `warmup_stable_decay`."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """`num_cycles`, `min_lr`, `min_lr_rate`, `num_decay_steps`."""
    warmup_steps: int | None = Field(None, ge=0)
    """`trainer.scheduler.warmup_steps`."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """Warmup as a fraction of all steps, rounded up."""
    max_steps: int | None = Field(None, ge=-1)
    """Optimizer steps; -1: unset."""
    num_train_epochs: float | None = Field(None, gt=0)
    """Passes over the data, instead of `max_steps`: the samples are counted."""
    batch_size: int | None = Field(None, ge=1)
    """Completions per step; unset: those of 16 prompts."""
    per_device_train_batch_size: int | None = Field(None, ge=1)
    """`batch_size`, divided by `gradient_accumulation_steps` and `launch.trainer_processes` (1 where that is unset)."""
    gradient_accumulation_steps: int | None = Field(None, ge=1)
    """A factor of `batch_size`, see `per_device_train_batch_size`; it does not change the memory use."""
    seed: int | None = None
    """`seed` of the run."""
    bf16: bool | None = None
    """`model.dtype`: true is bfloat16, false float32."""
    fp16: bool | None = None
    """Only false: training in float16 is not supported."""
    gradient_checkpointing: bool | None = None
    """`trainer.activation_checkpointing`: true is `full`."""
    torch_compile: bool | None = None
    """`trainer.compile`."""
    save_steps: int | None = Field(None, ge=1)
    """`trainer.ckpt.interval`."""
    save_total_limit: int | None = Field(None, ge=1)
    """`trainer.ckpt.keep_last`."""
    permanent_save_steps: int | None = Field(None, ge=1)
    """`trainer.ckpt.permanent_interval`: such checkpoints stay in `checkpoints/permanent/`."""
    eval_steps: int | None = Field(None, ge=1)
    """`data.eval.interval`."""
    report_to: str | list[str] | None = None
    """`wandb`, `tensorboard`, `trackio`, several of them, or `none`."""
    run_name: str | None = Field(None, min_length=1)
    """`storage.run_name`."""
    output_dir: str | None = Field(None, min_length=1)
    """`output_dir` of the run."""
    epsilon: float | None = Field(None, ge=0, le=1)
    """`trainer.loss.eps_low` of type `ppo_clip`, and `eps_high`, unless `epsilon_high` is set."""
    epsilon_high: float | None = Field(None, ge=0)
    """`trainer.loss.eps_high` of type `ppo_clip`."""
    beta: float | None = Field(None, ge=0)
    """`orchestrator.algo.kl.coef`: the weight of the KL penalty to the initial model, estimated by k3."""
    use_vllm: bool | None = None
    """`inference.engine`: true is `vllm`."""


class HackableConfig(Config):
    """The sections of the short form."""

    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    trainer: NamedTrainerConfig = Field(default_factory=NamedTrainerConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)
