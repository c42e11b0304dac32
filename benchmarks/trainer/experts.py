"""Training steps of a model with experts: grouped matrix products beside the plain loop over experts.

    python -m benchmarks.trainer.experts [--full-layers 6] [--lora-layers 24] [--steps 3] [--only full lora] [--tiny]

Layers of Qwen3-30B-A3B (128 experts, 8 of them per token) with random weights, computed in bfloat16, and its
vocabulary; a step is two rows of 16k tokens, forward, backward and optimizer. All parameters learn, or adapters of
rank 16.

    loop            the model's own code, a product for each expert
    transformers    grouped products of transformers, in the type of the parameters
    grouped         those of the trainer, in bfloat16; also with compiled layers

MFU counts the operations of parameters that a token uses, as `gpu_cases.py` counts those of dense models. `--tiny` is a
model and a step that a CPU computes in seconds, in float32 and without MFU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.models import fill_randomly, qwen3_config
from benchmarks.trainer.gpu_cases import PEAK, Case, draw
from rich.console import Console
from rich.table import Table

from headrace.rollout.packing import pack
from headrace.trainer import model as model_module
from headrace.trainer.loss import ce_loss
from headrace.trainer.losses import policy_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.trainer.step import TrainStep

WAYS = {"loop": ("eager", False), "transformers": ("grouped_mm", False)}
WAYS |= {"grouped": (model_module.GROUPED_EXPERTS, False), "grouped, compiled": (model_module.GROUPED_EXPERTS, True)}
WARM_UP_STEPS = 2
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
GIB = 2**30


def active_parameters(config: Any) -> int:
    """Return the parameters that a token is multiplied with: the input table is only read."""
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    experts = 3 * config.num_experts_per_tok * config.moe_intermediate_size + config.num_experts
    layer = config.hidden_size * (2 * queries + 2 * keys + experts)
    return int(config.num_hidden_layers * layer + config.hidden_size * config.vocab_size)


def operations(config: Any, lengths: list[int], *, lora: bool) -> float:
    heads = config.num_attention_heads * config.head_dim
    attention = 6 * config.num_hidden_layers * heads * sum(length**2 for length in lengths)
    return (4 if lora else 6) * active_parameters(config) * sum(lengths) + attention


def build(config: Any, case: Case, implementation: str, *, compiles: bool) -> PackedModel:
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        model_module.GROUPED_EXPERTS = implementation  # type: ignore[misc]
        model = PackedModel(
            Path(directory),
            dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
            load=False,
            longest=case.row,
            lora={"r": 16, "alpha": 32} if case.lora else None,
            activation_checkpointing="auto",
            compile=compiles,
        )
    fill_randomly(model.module)
    return model


def measure(config: Any, case: Case, way: str) -> tuple[list[float], list[float], str]:
    """Return tokens per second and MFU of each step, and the memory plan."""
    implementation, compiles = WAYS[way]
    model = build(config, case, implementation, compiles=compiles)
    losses = {"rl": policy_loss("default"), "ce": ce_loss}
    step = TrainStep(model, Optimizer(model.named_parameters()), losses, micro_batch_tokens=None)
    speeds, shares = [], []
    for seed in range(-WARM_UP_STEPS, case.steps):
        samples = draw(case, 1000 + seed)
        lengths = [len(sample) for sample in samples]
        start = time.perf_counter()
        result = step.run(pack(samples, case.row), lr=1e-6)  # waits for the device: its result has the gradient's norm
        seconds = time.perf_counter() - start
        assert result is not None and result.grad_norm > 0
        if seed >= 0:
            speeds.append(sum(lengths) / seconds)
            shares.append(operations(config, lengths, lora=case.lora) / seconds / PEAK)
    return speeds, shares, str(model.plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full-layers", type=int, default=6)
    parser.add_argument("--lora-layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    table = Table(title="Layers of Qwen3-30B-A3B")
    for column in (
        "trained",
        "layers",
        "active",
        "experts",
        "tokens/s",
        "times loop",
        "MFU",
        "GiB",
        "memory plan",
    ):
        table.add_column(column)
    for trained in arguments.only:
        config = qwen3_config("30b-a3b")
        config.update({"num_hidden_layers": vars(arguments)[f"{trained}_layers"], **(TINY if arguments.tiny else {})})
        model = (trained, str(config.num_hidden_layers), f"{active_parameters(config) / 1e6:,.0f}M")
        row = 256 if arguments.tiny else 16384
        case = Case(trained, "4b", 0.0, is_mixed=True, row=row, lora=trained == "lora", rows=2, steps=arguments.steps)
        loop = None
        for way in arguments.ways:
            on_gpu = torch.cuda.is_available()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            try:
                speeds, shares, plan = measure(config, case, way)
            except torch.OutOfMemoryError as error:
                speeds, shares, plan = [0.0], [0.0], str(error)[:60]
            speed = statistics.median(speeds)
            loop = speed if way == "loop" else loop
            cells = (f"{speed:,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})", f"{speed / loop:.2f}" if loop else "")
            peak = f"{torch.cuda.max_memory_allocated() / GIB:.1f}" if on_gpu else ""
            table.add_row(*model, way, *cells, f"{statistics.median(shares):.3f}" if on_gpu else "", peak, plan)
            print(f"{trained}, {way}: {speed:,.0f} tokens/s", flush=True)
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
