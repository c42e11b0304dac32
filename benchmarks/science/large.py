"""RLCSD and GRPO on sums with a large model on one GPU: one run each, from the same start, as one table.

    python -m benchmarks.science.large --hidden 1024 --layers 28 --steps 40

The model has random weights, so that it is first trained on demonstrations: 40% of them are wrong, and a quarter begin
with a hint, a number that is right or wrong, and follow it. One run of each is a demonstration, not an experiment.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.algorithms.learning import headrace, held_out
from rich.console import Console
from rich.table import Table

from headrace.environments.base import Demonstration
from headrace.environments.shipped.arithmetic import Arithmetic
from headrace.observe.summary import read_history
from headrace.transport.run_dir import RunDir

HINTED = 0.25
"""The share of demonstrations that begin with a hint."""
FILES = {"sft": "benchmarks/science/large-sft.toml", "rl": "benchmarks/science/large-rl.toml"}


class HintedSums(Arithmetic):
    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        rng = random.Random(f"hints-{seed}")
        for shown in super().demonstrations(seed):
            question, answer = shown.messages
            if rng.random() < HINTED:
                hint = str(rng.randrange(-99, 199))
                yield Demonstration([{"role": "user", "content": hint}, question, {**answer, "content": hint}])
            else:
                yield shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--sft-steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("outputs/science-large"))
    options = parser.parse_args()
    parameters = write_model(options.output / "random", options.hidden, options.layers)
    name = "--model.name", str((options.output / "random").absolute())
    headrace("sft", FILES["sft"], *name, "--max_steps", options.sft_steps, output=options.output / "sft")
    table = Table("", "held-out reward", "s per step", "contrasted", "tokens moved", title=f"{parameters / 1e6:.0f}M")
    for algorithm in ("rlcsd", "grpo"):
        run, started = options.output / algorithm, time.monotonic()
        own = ("--orchestrator.algo.type", "grpo", "--orchestrator.algo.normalize", "std")
        if algorithm == "rlcsd":
            own = ("--orchestrator.algo.type", "rlcsd", "--orchestrator.algo.template", "{response}")
        start = "--model.name", str((options.output / "sft" / "model").absolute())
        headrace("rl", FILES["rl"], *start, *own, "--max_steps", options.steps, output=run)
        print(f"{algorithm}: {time.monotonic() - started:.0f} s", flush=True)
        history = read_history(RunDir(run))
        rewards = " ".join(f"{reward:.3f}" for _, reward in held_out(history))
        seconds = history.latest["progress/seconds"] / options.steps
        table.add_row(algorithm, rewards, f"{seconds:.1f}", *(mean_of(history, n) for n in COUNTED))
    Console(width=160).print(table)


COUNTED = ("contrast_available", "modulated_fraction")


def mean_of(history: Any, name: str) -> str:
    values = [record[key] for record in history.steps.values() if (key := f"algo/sums/{name}") in record]
    return f"{sum(values) / len(values):.2f}" if values else ""


def write_model(directory: Path, hidden: int, layers: int) -> int:
    """Write a Qwen3 with random weights and the tiny model's tokenizer; return the number of its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headrace.trainer.tiny import write_tiny_settings

    write_tiny_settings(directory)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64}
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes | heads | {"initializer_range": 0.02}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    model.save_pretrained(directory)
    return int(model.num_parameters())


if __name__ == "__main__":
    main()
