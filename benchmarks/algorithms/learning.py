"""Every algorithm's example, over several seeds: what it learns, and how soon. One table, and the curves of the docs.

    python benchmarks/algorithms/learning.py --seeds 3 --jobs 9 --output outputs/learning

A run that is there is not run again. The teacher of the distillations is trained and served here, too.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from headrace.observe.chart import comparison_chart
from headrace.observe.metrics import Curve, History
from headrace.observe.summary import read_history
from headrace.transport.run_dir import RunDir

WORDS, CALCULATOR = "examples/reverse-text/rl.toml", "examples/calculator/rl.toml"
OURS = "examples/algorithms"
HINTED, WORDY = f"{OURS}/hinted-sft.toml", f"{OURS}/wordy-sft.toml"
REACHED = 0.95
"""Of the teacher's reward, to have reached it."""


class Case(NamedTuple):
    """A kind of run: its files, and whatever else the command line has."""

    files: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    taught: bool = False


OFTEN = ("--orchestrator.eval.interval", "2")
NO_PENALTY = ("--orchestrator.algo.length_penalty.coef", "0")
CASES = {
    "grpo": Case((WORDS,)),
    "grpo, lr 1e-3": Case((WORDS,), ("--trainer.optim.lr", "1e-3", "--max_steps", "80", *OFTEN)),
    "max_rl": Case((WORDS, f"{OURS}/max-rl.toml")),
    "opd": Case((WORDS, f"{OURS}/opd.toml"), OFTEN, taught=True),
    "sft-distillation": Case((WORDS, f"{OURS}/sft-distillation.toml"), OFTEN, taught=True),
    "mixed": Case((WORDS, f"{OURS}/mixed.toml"), taught=True),
    "grpo, hinted start": Case((WORDS,), ("--model.sft", HINTED)),
    "opsd": Case((WORDS, f"{OURS}/opsd.toml")),
    "rlcsd": Case((WORDS, f"{OURS}/rlcsd.toml")),
    "grpo, wordy start": Case((WORDS, f"{OURS}/length-penalty.toml"), NO_PENALTY),
    "grpo + linear penalty": Case((WORDS, f"{OURS}/length-penalty.toml")),
    "grpo, calculator": Case((CALCULATOR,)),
    "echo": Case((CALCULATOR, f"{OURS}/echo.toml")),
}
FIGURES = {
    "max-rl": ("GRPO and MaxRL", ("grpo", "max_rl")),
    "distillation": ("Distillation and GRPO", ("opd", "sft-distillation", "grpo, lr 1e-3")),
    "hints": ("From a start that follows hints", ("opsd", "rlcsd", "grpo, hinted start")),
    "echo": ("A calculator: GRPO and ECHO", ("echo", "grpo, calculator")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--output", type=Path, default=Path("outputs/learning"))
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    runs = [(name, seed) for seed in range(options.seeds) for name in options.only]
    teacher = options.output / "teacher"
    if any(CASES[name].taught for name in options.only):
        headrace("sft", "examples/reverse-text/sft.toml", f"{OURS}/teacher.toml", output=teacher)
        evaluate(teacher / "model", options.output)
    with served(teacher / "model", options.output / "teacher.log") as url, ThreadPoolExecutor(options.jobs) as pool:
        files = {name: files_of(CASES[name], url, options.output) for name in options.only}
        list(pool.map(lambda run: execute(*run, files[run[0]], options.output), runs))
    report(options.output, options.only, options.seeds)


def execute(name: str, seed: int, files: Sequence[str], output: Path) -> None:
    started = time.monotonic()
    headrace("rl", *files, *CASES[name].overrides, "--seed", seed, output=place(output, name, seed))
    print(f"{name}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)


def place(output: Path, name: str, seed: int) -> Path:
    return output / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"


def evaluate(model: Path, output: Path) -> None:
    """The model's reward, as the others' are had: before the one step of a run."""
    file = output / "evaluation.toml"
    file.write_text(replaced(WORDS, 'sft = "sft.toml"', f'name = "{model.resolve()}"'))
    headrace("rl", file, "--max_steps", 1, output=output / "evaluation")


def files_of(case: Case, url: str, output: Path) -> list[str]:
    """Its run files, with the address of the teacher that is served here."""
    if not case.taught:
        return list(case.files)
    *others, ours = case.files
    copy = output / Path(ours).name
    copy.write_text(replaced(ours, "http://127.0.0.1:8001/v1", url))
    return [*others, str(copy)]


def replaced(file: str, old: str, new: str) -> str:
    content = Path(file).read_text()
    assert old in content, f"{file} no longer says {old}"
    return content.replace(old, new)


def headrace(command: str, *arguments: object, output: Path) -> None:
    if (output / "model").is_dir():
        return
    words = [sys.executable, "-m", "headrace", command, *map(str, arguments), "--output_dir", str(output), "--clean"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """The teacher behind a port of its own; without a model, nothing."""
    if not model.is_dir():
        yield ""
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "serve",
        str(model),
        "--port",
        str(port),
        "--served_name",
        "teacher",
        "--renderer.enable_thinking",
        "false",
    ]
    with log.open("w") as file:
        server = subprocess.Popen([sys.executable, "-m", "headrace", *words], stdout=file, stderr=file)
        try:
            wait_for(f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait()


def wait_for(url: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def report(output: Path, names: Sequence[str], seeds: int) -> None:
    level = teachers_reward(output)
    table = Table(title=f"{seeds} seeds; the teacher earns {level:.3f}" if level else f"{seeds} seeds")
    columns = (
        "",
        "held-out at the start",
        "at the end",
        "steps to the teacher's",
        "tokens, first and last step",
        "counted",
    )
    for column in columns:
        table.add_column(column)
    histories = {name: [read_history(RunDir(place(output, name, seed))) for seed in range(seeds)] for name in names}
    for name, runs in histories.items():
        for env in sorted({env for run in runs for env in run.evals}):
            curves = [sorted(run.evals[env].items()) for run in runs]
            table.add_row(
                name if len(runs[0].evals) == 1 else f"{name}, {env}",
                " ".join(f"{curve[0][1]:.3f}" for curve in curves),
                " ".join(f"{curve[-1][1]:.3f}" for curve in curves),
                " ".join(str(steps_to(curve, REACHED * level)) for curve in curves) if level else "",
                " ".join(f"{lengths(run)[0][1]:.1f}>{lengths(run)[-1][1]:.1f}" for run in runs),
                counted(runs),
            )
    Console(width=200).print(table)
    draw(output, histories, level)


def draw(output: Path, histories: dict[str, list[History]], level: float | None) -> None:
    for file, (title, names) in FIGURES.items():
        curves = {name: [held_out(run) for run in histories[name]] for name in names if name in histories}
        if curves:
            shown = ("teacher", level) if level and file == "distillation" else None
            (output / f"{file}.svg").write_text(comparison_chart(f"{title}: held-out reward", curves, shown))
    for file, title, read in (("penalty-reward", "held-out reward", held_out), ("penalty-length", "tokens", lengths)):
        names = ("grpo + linear penalty", "grpo, wordy start")
        curves = {name: [read(run) for run in histories[name]] for name in names if name in histories}
        if curves:
            (output / f"{file}.svg").write_text(comparison_chart(f"A length penalty: {title}", curves, what=title))
    if "mixed" in histories:
        runs = histories["mixed"]
        curves = {env: [sorted(run.evals[env].items()) for run in runs] for env in runs[0].evals}
        named = {"short": "short words, GRPO", "long": "long words, distilled"}
        renamed = {named[env]: runs for env, runs in curves.items()}
        (output / "mixed.svg").write_text(comparison_chart("Two algorithms in one run: held-out reward", renamed))


def teachers_reward(output: Path) -> float | None:
    if not (output / "evaluation").is_dir():
        return None
    return held_out(read_history(RunDir(output / "evaluation")))[0][1]


def held_out(run: History) -> Curve:
    (curve,) = run.evals.values()
    return sorted(curve.items())


def lengths(run: History) -> Curve:
    return [(step, record["decode_len/all/mean"]) for step, record in sorted(run.steps.items())]


def steps_to(curve: Curve, reward: float) -> int | str:
    return next((step for step, value in curve if value >= reward), "-")


def counted(runs: Sequence[History]) -> str:
    """What the algorithms count, averaged over steps and seeds."""
    records = [record for run in runs for record in run.steps.values()]
    names = sorted({key for record in records for key in record if key.startswith("algo/")})
    values = {name: [record[name] for record in records if name in record] for name in names}
    return " ".join(f"{name.split('/', 2)[-1]} {mean(found):.3g}" for name, found in values.items())


if __name__ == "__main__":
    main()
