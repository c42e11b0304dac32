"""What a rollout of a taskset of verifiers costs this process, beside the same environment written for Headrace.

    python benchmarks/environments/verifiers_rollouts.py [--concurrent 256] [--rollouts 1000] [--only tool]

As `rollouts.py`: dispatcher, sampler, client, environment, merging and GRPO are the orchestrator's own, the engine is
another process on this machine. `CPU ms` is what this process spends on a rollout, and the engine's time is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rollouts import SEQ_LEN, Bench, Case, engine_process

from headrace.algorithms.grpo import Grpo
from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.orchestrator.dispatcher import Dispatcher, EpisodeRunner
from headrace.orchestrator.orchestrator import GC_THRESHOLDS
from headrace.orchestrator.processing import TrainProcessing
from headrace.orchestrator.sampler import Sampler
from headrace.orchestrator.signals import Kind
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.tiny import write_tiny_model

MODULE = "verifiers_tasksets"
TALK = {"env": {"id": f"{MODULE}:TalkEnv"}}
TWINS: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "one turn": ((f"{MODULE}:Question", {}), (f"verifiers:{MODULE}:Questions", {})),
    "three turns": ((f"{MODULE}:Talk", {}), (f"verifiers:{MODULE}:Questions", TALK)),
    "tool": ((f"{MODULE}:Calculation", {}), (f"verifiers:{MODULE}:Calculations", {})),
}
TOKENS = 96
COLUMNS = ("turns", "prompt", "sampled", "per second", "CPU ms")


async def measure(model: Path, identifier: str, args: dict[str, Any], arguments: argparse.Namespace) -> list[float]:
    tokenizer = Tokenizer(model)
    renderer = make_renderer(model, tokenizer)
    environment = load_environment(identifier, args)
    tasks = tasks_of(environment, identifier)
    await environment.start()
    async with engine_process(model, Case(identifier, 0, TOKENS, 0), arguments.median) as client:
        processing = TrainProcessing({identifier: Grpo()}, {identifier: environment}, [], [], SEQ_LEN)
        bench = Bench(tasks, processing, arguments.concurrent, arguments.rollouts)
        runner = EpisodeRunner(
            environment, Sampler(client, renderer, tokenizer, SEQ_LEN), 600.0, processing.process_rollout
        )
        bench.dispatcher = Dispatcher({(Kind.TRAIN, identifier): runner}, bench.receive)
        cpu, began = time.process_time(), time.monotonic()
        await bench.run()
        cpu, seconds = time.process_time() - cpu, time.monotonic() - began
        await bench.dispatcher.close()
    await environment.close()
    arrived = bench.arrived[: arguments.rollouts]
    return [
        float(np.mean([len(rollout.turns) for rollout in arrived])),
        float(np.mean([len(rollout.turns[-1].prompt_ids) for rollout in arrived])),
        float(np.mean([rollout.completion_tokens for rollout in arrived])),
        len(arrived) / seconds,
        1e3 * cpu / len(arrived),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--median", type=float, default=0.5, help="seconds that the engine takes over a reply")
    parser.add_argument("--only", default="", help="one of: " + ", ".join(TWINS))
    arguments = parser.parse_args()
    sys.path.append(str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory))
        gc.freeze()  # what came with torch, which the orchestrator has not
        gc.set_threshold(*GC_THRESHOLDS)
        print(f"{'':<24}" + "".join(f"{name:>11}" for name in COLUMNS), flush=True)
        for name, (ours, theirs) in TWINS.items():
            if arguments.only not in ("", name):
                continue
            for kind, (identifier, args) in (("Headrace", ours), ("verifiers", theirs)):
                values = asyncio.run(measure(Path(directory), identifier, args, arguments))
                print(f"{name:<13}{kind:<11}" + "".join(f"{value:>11.2f}" for value in values), flush=True)


if __name__ == "__main__":
    main()
