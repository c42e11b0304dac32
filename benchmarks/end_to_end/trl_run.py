"""TRL's GRPOTrainer on the example, as a contender: with `generate` of transformers, or with vLLM in its process.

    python -m benchmarks.end_to_end.trl_run SETTINGS ENGINE DIRECTORY

As Headrace does it: the same prompts in the same order, advantages that are centered and not scaled, PPO's clip, no KL,
the loss a mean over all tokens of a step, float32 weights under bfloat16 autocast, AdamW at a constant rate. No
activations are recomputed, since there is memory. The run begins when the trainer has loaded everything.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.settings import Point, Settings, drawn_prompts, tool_calls

VLLM_PYTHON = "HEADRACE_VLLM_PYTHON"
REPORTS = "reports.jsonl"
SEQUENCES_AT_ONCE = 64
LONGEST = 384


def command(settings: Settings, engine: str, place: Path) -> list[str]:
    python = os.environ[VLLM_PYTHON] if engine == "vllm" else sys.executable
    return [python, "-m", "benchmarks.end_to_end.trl_run", json.dumps(settings._asdict()), engine, str(place)]


def read(place: Path) -> tuple[float | None, list[Point]]:
    """When it began, by the clock, if it has, and its steps so far."""
    file = place / REPORTS
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    if not records:
        return None, []
    began = records[0]["began"]
    return began, [Point(r["step"], r["time"] - began, r["reward"], r["exact"]) for r in records[1:]]


def train(settings: Settings, engine: str, place: Path) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    example = tool_calls()
    place.mkdir(parents=True, exist_ok=True)
    reports = (place / REPORTS).open("w", buffering=1)
    steps = iter(range(1, settings.steps + 1))

    class Begin(TrainerCallback):
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            print(json.dumps({"began": time.time()}), file=reports)

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **others: Any) -> list[float]:
        """Called once per step, with all of its answers."""
        texts = [completion[0]["content"] for completion in completions]
        parts = [example.tag, example.form, example.name, example.arguments]
        tasks = [{"answer": each} for each in answer]
        rewards = [sum(part(text, task) for part in parts) for text, task in zip(texts, tasks, strict=True)]
        exact = [example.exact(text, task) for text, task in zip(texts, tasks, strict=True)]
        means = {"reward": sum(rewards) / len(rewards), "exact": sum(exact) / len(exact)}
        print(json.dumps({"step": next(steps), "time": time.time(), **means}), file=reports)
        return rewards

    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in asyncio.run(drawn_prompts(settings))]
    arguments = GRPOConfig(
        output_dir=str(place),
        max_steps=settings.steps,
        per_device_train_batch_size=min(SEQUENCES_AT_ONCE, settings.rollouts),
        gradient_accumulation_steps=max(1, settings.rollouts // SEQUENCES_AT_ONCE),
        num_generations=settings.group,
        max_completion_length=settings.max_tokens,
        temperature=settings.temperature,
        shuffle_dataset=False,
        seed=settings.seed,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="none",
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=torch.cuda.is_available(),
        use_vllm=engine == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=LONGEST,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        settings.model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(settings.model, padding_side="left"),
        callbacks=[Begin()],
    )
    trainer.train()


if __name__ == "__main__":
    train(Settings(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
