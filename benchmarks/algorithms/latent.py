"""Thoughts in latent space against thoughts in tokens: what each learns from the same start, over several seeds.

    python -m benchmarks.algorithms.latent --seeds 3 --output outputs/latent

The task is the miniature of examples/hackable-gsm8k: sums of one digit by a tiny model that thinks first. Both arms are
trained on-policy with the same loss and the same advantages. The accuracy of a model with latents, on the sums that it
was trained on, is measured with and without them. A run that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from headrace.observe.metrics import History
from headrace.observe.summary import read_history
from headrace.transport.run_dir import RunDir

FILES = ("examples/hackable-gsm8k/base.yaml", "examples/hackable-gsm8k/miniature/rl.yaml")
SAME = {
    "objective.kwargs.reward_mode": "additive",
    "orchestrator.max_async_level": "0",
    "orchestrator.algo.normalize": "std",
    "trainer.loss.type": "reinforce",
    "data.eval.interval": "1000",
}
ARMS = {
    "tokens": {"objective.name": "token_grpo"},
    "latent": {"objective.name": "latent_neuralese"},
    "soft": {"objective.name": "soft_tokens"},
}
LAST_STEPS = 5
"""Steps whose mean reward is that of the end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--gates-lr", type=float, default=1e-4)
    parser.add_argument("--retention-lr", type=float, default=1e-3)
    parser.add_argument("--arms", nargs="+", default=["tokens", "latent"], choices=list(ARMS))
    parser.add_argument("--output", type=Path, default=Path("outputs/latent"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    gates = {"model.latents.gates_lr": options.gates_lr, "model.latents.retention_lr": options.retention_lr}
    sizes = {"max_steps": options.steps, "trainer.batch_size": options.batch, "trainer.learning_rate": options.lr}
    for seed in range(options.seeds):
        for arm in options.arms:
            more = gates if arm == "latent" else {}
            train(options.output / f"{arm}-{seed}", {**SAME, **ARMS[arm], **sizes, **more, "seed": seed})
    report(options.output, options.arms, options.seeds)


def train(run: Path, settings: dict[str, object]) -> None:
    if (run / "model").is_dir():
        return
    started = time.monotonic()
    overrides = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    headrace("rl", *FILES, *overrides, "--output_dir", str(run), "--clean")
    print(f"{run.name}: {time.monotonic() - started:.0f} s", flush=True)


def accuracy(run: Path, latents: str) -> float:
    """Return the accuracy of a run's final model, thinking with latents `on` or `off`."""
    output = run.parent / f"{run.name}-eval-{latents}"
    sampling = ["--temperature", "1", "--samples", "4", "--max-tokens", "72", "--seed", "0", "--latents", latents]
    headrace("eval", str(run), *sampling, "--output", str(output))
    (result,) = json.loads((output / "results.json").read_text())["models"]
    return float(result["estimates"]["pass@1"]["value"])


def headrace(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def report(output: Path, arms: Sequence[str], seeds: int) -> None:
    table = Table(title=f"{seeds} seeds")
    for column in (
        "",
        "reward, first steps",
        "last steps",
        "accuracy",
        "without latents",
        "embeds_ratio",
        "latent_ratio",
    ):
        table.add_column(column)
    for arm in arms:
        runs = [output / f"{arm}-{seed}" for seed in range(seeds)]
        histories = [read_history(RunDir(run)) for run in runs]
        thinks = arm == "latent"
        table.add_row(
            arm,
            shown([mean(rewards(history)[:LAST_STEPS]) for history in histories]),
            shown([mean(rewards(history)[-LAST_STEPS:]) for history in histories]),
            shown([accuracy(run, "on" if thinks else "off") for run in runs]),
            shown([accuracy(run, "off") for run in runs]) if thinks else "",
            *(ends(histories, f"latents/{name}") if thinks else "" for name in ("embeds_ratio", "latent_ratio")),
        )
    Console(width=160).print(table)


def rewards(history: History) -> list[float]:
    return [float(record["reward/all/mean"]) for _, record in sorted(history.steps.items())]


def ends(histories: Sequence[History], name: str) -> str:
    """Return the first and the last value of a metric in each run."""
    curves = [[float(record[name]) for _, record in sorted(history.trained.items())] for history in histories]
    return " ".join(f"{curve[0]:.4f}>{curve[-1]:.4f}" for curve in curves)


def shown(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ({' '.join(f'{value:.3f}' for value in values)})"


if __name__ == "__main__":
    main()
