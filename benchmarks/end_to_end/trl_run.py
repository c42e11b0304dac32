"""TRL's GRPOTrainer on a workload, as a contender: with `generate` of transformers, or with vLLM in its process.

    python -m benchmarks.end_to_end.trl_run SETTINGS ENGINE DIRECTORY

As Headrace does it: the same prompts in the same order, advantages that are centered and not scaled, PPO's clip, no KL,
the loss a mean over all tokens of a step, float32 weights under bfloat16 autocast, AdamW at a constant rate. The run
begins when the trainer has loaded everything. With vLLM, settings are the fastest that TRL 1.16 has for one GPU:

- vLLM colocated, awake during training (waking it costs time, and memory suffices). A fifth of a GPU of 139 GiB holds
  the keys and values of 256 requests of full length several times over, and leaves the rest to training.
- No activations are recomputed (TRL's default would), so a micro-batch has as many sequences as memory holds without
  that: 32 of the 0.5B model with padding are 23k tokens, which fill the GPU.
- Liger's kernels for norms, rotary embeddings and SwiGLU; TRL's own chunked head is always on. Hub kernels
  (`use_kernels`, FlashAttention among them) need a network: attention is torch's SDPA.
- No correction for the difference between vLLM's logprobs and the trainer's: it costs a forward of the whole batch.
- vLLM makes no text: TRL decodes the tokens itself.

Left out: `torch_compile` (each padded length would be compiled again), `steps_per_generation` above the step and
`num_iterations` above 1 (other algorithms), and TRL's experimental asynchronous trainer (vLLM on a GPU of its own).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from benchmarks.end_to_end.settings import UNKNOWN, Point, Settings, Workload, drawn_prompts, workload_of

VLLM_PYTHON = "HEADRACE_VLLM_PYTHON"
REPORTS = "reports.jsonl"
SEQUENCES_AT_ONCE = {"tool-calls": 64, "gsm8k": 32, "gsm8k-stand-in": 32}
VLLM_MEMORY = 0.2
"""Of the GPU."""


def command(settings: Settings, engine: str, place: Path) -> list[str]:
    python = os.environ[VLLM_PYTHON] if engine == "vllm" else sys.executable
    return [python, "-m", "benchmarks.end_to_end.trl_run", json.dumps(settings._asdict()), engine, str(place)]


def read(place: Path) -> tuple[float | None, list[Point]]:
    """Return when the run began, by the clock, if it has, and its steps so far."""
    file = place / REPORTS
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    if not records:
        return None, []
    began, steps = records[0]["began"], records[1:]
    training_s = [after["time"] - after["sampling_s"] - step["time"] for step, after in pairwise(steps)]
    return began, [
        Point(step["step"], step["time"] - began, step["reward"], step["exact"], step["mean_tokens"], training)
        for step, training in zip(steps, [*training_s, UNKNOWN], strict=False)
    ]


def train(settings: Settings, engine: str, place: Path) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    place.mkdir(parents=True, exist_ok=True)
    reports = (place / REPORTS).open("w", buffering=1)
    workload = workload_of(settings.workload)
    steps = itertools.count(1)
    generation_began = 0.0

    class Begin(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **named: Any) -> None:
            print(json.dumps({"began": time.time()}), file=reports)

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            nonlocal generation_began
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the optimizer's step counts as training
            generation_began = time.time()
            return super()._generate_and_score_completions(inputs)

    def reward(
        completions: list[list[dict[str, str]]], completion_ids: list[list[int]], answer: list[str], **others: Any
    ) -> list[float]:
        """Called once per step, with all of its answers."""
        samples = [(each[0]["content"], {"answer": gold}) for each, gold in zip(completions, answer, strict=True)]
        rewards = [sum(part(*sample) for part in workload.rewards) for sample in samples]
        now = time.time()
        report = {
            "step": next(steps),
            "time": now,
            "reward": mean(rewards),
            "exact": mean(workload.exact(*sample) for sample in samples),
            "mean_tokens": mean(map(len, completion_ids)),
            "sampling_s": now - generation_began,
        }
        print(json.dumps(report), file=reports)
        return rewards

    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in asyncio.run(drawn_prompts(settings))]
    trainer = Timed(
        settings.model,
        reward_funcs=reward,
        args=GRPOConfig(**trainer_arguments(settings, workload, engine, place)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(settings.model, padding_side="left"),
        callbacks=[Begin()],
    )
    trainer.train()


def trainer_arguments(settings: Settings, workload: Workload, engine: str, place: Path) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    at_once = min(SEQUENCES_AT_ONCE[settings.workload], settings.rollouts)
    arguments = {
        "output_dir": str(place),
        "max_steps": settings.steps,
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": settings.rollouts // at_once,
        "num_generations": settings.group,
        "max_completion_length": settings.max_tokens,
        "temperature": settings.temperature,
        "shuffle_dataset": False,
        "seed": settings.seed,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "none",
        "learning_rate": settings.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "bf16": on_gpu,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if engine == "vllm":
        arguments |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": VLLM_MEMORY,
            "vllm_enable_sleep_mode": False,
            "vllm_max_model_length": workload.max_model_len,
            "vllm_importance_sampling_correction": False,
            "generation_kwargs": {"detokenize": False},
            "use_liger_kernel": on_gpu,
        }
    further = (override.split("=", 1) for override in settings.trl)
    return arguments | {key: json.loads(value) for key, value in further}


if __name__ == "__main__":
    train(Settings(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
