"""How long the trainer's layers take to compile: with empty caches, and in a second process with full ones.

    python -m benchmarks.trainer.compile_time [--size 4b] [--layers N] [--memory-gb GB] [--lora RANK]

A model of that shape computes logprobs of three rows of other lengths and runs backward, in a process of its own. Its
weights are not initialized, since nothing depends on them. `programs` are compiled layers, at best one for each kind
that the memory plan has; `traced` are those that AOTAutograd traced, of which `cached` came from the cache of the
process before. A program's time is split: `tracing` is the compiler's reading of Python, which no cache saves,
`generating` everything behind it. With `--memory-gb` the plan has layers of two kinds where all would fit otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.models import QWEN3, qwen3_config

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
SIZES = ("tiny", "0.5b", *QWEN3)
COLUMNS = ("load", "step 1", "step 2", "step 3", "programs", "traced", "cached", "bypassed", "tracing", "generating")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="4b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--tokens", type=int, default=4096, help="of the first row (default 4096)")
    parser.add_argument("--memory-gb", type=float, help="of a step (default: what is free)")
    parser.add_argument("--lora", type=int, metavar="RANK")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, arguments)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = tiny_config() if arguments.size == "tiny" else qwen3_config(arguments.size)
        if arguments.layers is not None:
            config.num_hidden_layers = arguments.layers
            config.layer_types = config.layer_types[: arguments.layers]
        config.save_pretrained(folder)
        environment = os.environ | {variable: str(folder / name) for variable, name in CACHES.items()}
        print(f"{'caches':<8}{''.join(f'{column:>11}' for column in COLUMNS)}")
        for caches in ("empty", "full"):
            command = [sys.executable, "-m", "benchmarks.trainer.compile_time", *sys.argv[1:], "--measure", str(folder)]
            child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(child.stdout.splitlines()[-1])
            cells = [row[column] for column in COLUMNS]
            texts = [f"{cell:.1f} s" if isinstance(cell, float) else str(cell) for cell in cells]
            print(f"{caches:<8}{''.join(f'{text:>11}' for text in texts)}", flush=True)
        print(f"{row['plan']}; {row['device']}, torch {row['torch']}")


def tiny_config() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )


def measure(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compile in this process, and return a row of the table."""
    import torch
    from torch._dynamo.utils import counters, get_compilation_metrics

    from headrace.trainer.model import PackedModel
    from headrace.trainer.warmup import warmup_rows

    start = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    lora = {"r": arguments.lora, "alpha": 2.0 * arguments.lora, "seed": 0} if arguments.lora else None
    model = PackedModel(
        directory,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        activation_checkpointing="auto",
        compile=True,
        memory=None if arguments.memory_gb is None else int(arguments.memory_gb * 1e9),
        longest=1024,
        load=False,
        lora=lora,
    )
    row: dict[str, Any] = {"load": time.perf_counter() - start}
    vocabulary = int(model.module.config.vocab_size)
    for number, tokens in enumerate((arguments.tokens, arguments.tokens // 3, arguments.tokens // 2), 1):
        start = time.perf_counter()
        samples = warmup_rows(vocabulary, 1024, tokens)[number % 2]
        packed = model.pack_row([sample.token_ids for sample in samples])
        places = torch.arange(packed.token_ids.shape[1], device=model.device)
        labels = packed.token_ids[0].roll(-1)
        scores = model.score(packed, places, labels, torch.ones(len(places), device=model.device))
        scores.logprobs.nan_to_num().sum().backward()
        model.module.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        row[f"step {number}"] = time.perf_counter() - start
    traced = counters["aot_autograd"]
    row |= {"programs": counters["stats"]["unique_graphs"], "traced": traced["total"]}
    row |= {"cached": traced["autograd_cache_hit"], "bypassed": traced["autograd_cache_bypass"]}
    whole, generating = (
        sum(getattr(metrics, name) or 0.0 for metrics in get_compilation_metrics())
        for name in ("entire_frame_compile_time_s", "backend_compile_time_s")
    )
    row |= {"tracing": float(whole - generating), "generating": float(generating)}
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    return {**row, "plan": str(model.plan), "device": device, "torch": torch.__version__}


if __name__ == "__main__":
    main()
