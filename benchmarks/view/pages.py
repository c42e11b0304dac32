"""How fast pages of `headrace view` open and scroll in a real Chromium, and the memory of the server.

    .venv-view/bin/python benchmarks/view/pages.py [--runs 500] [--steps 10000] [--tokens 32000]

The runs are copies of a recorded one with as many steps, and a rollout with as many tokens, as given. A page is open
when its content is on the screen: two frames after the last row, chart or coloured token of the first screen is there,
counted from the navigation. Scrolling is 80 frames of 150 pixels; a frame's time is that between two callbacks of
`requestAnimationFrame`, 16.7 ms at best. The memory is the server's peak (VmHWM). Each page is opened three times in a
new context, the first time with a new server, whose caches are empty. The CPU times are until the page is open: on a
busy machine they say more than the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

from headrace.rollout.types import Rollout, Sample
from headrace.transport.rollout_files import write_rollouts

RECORDED = Path(__file__).parents[2] / "tests" / "data" / "recorded-runs"
STEP = 5
REPEATS = 3
OPEN = """selector => new Promise(resolve => {
  const look = () => document.querySelector(selector)
    ? requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now())))
    : requestAnimationFrame(look);
  look();
})"""
SCROLL = """async selector => {
  const target = document.querySelector(selector);
  const frames = [];
  let last = await new Promise(requestAnimationFrame);
  for (let i = 0; i < 80; i++) {
    target.scrollBy(0, 150);
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
  }
  return frames;
}"""


def write_metrics(path: Path, steps: int) -> None:
    """Write metrics of as many steps: the records of a recorded step, again and again, with a reward that rises."""
    records = [json.loads(line) for line in (RECORDED / "rl" / "metrics.jsonl").read_text().splitlines()]
    templates = [record for record in records if record["step"] == 2]
    with path.open("w") as file:
        for step in range(1, steps + 1):
            for record in templates:
                moved = record | {"step": step}
                if "reward/all/mean" in moved:
                    moved["reward/all/mean"] = 1 - math.exp(-step / steps) + 0.1 * math.sin(step)
                file.write(json.dumps(moved) + "\n")


def make_runs(folder: Path, runs: int, steps: int, tokens: int) -> None:
    """Make `many`, a folder of runs of 50 steps; `long`, a run of many steps; `tokens`, a run with a long rollout."""
    config = (RECORDED / "rl" / "config.toml").read_text().replace("@HERE@", str(folder))
    for number in range(runs):
        run = folder / "many" / f"run-{number:03d}"
        run.mkdir(parents=True)
        (run / "config.toml").write_text(re.sub(r"\nlr = .*", f"\nlr = {(number % 7 + 1) * 1e-4}", config))
        write_metrics(run / "metrics.jsonl", 50)
    for name in ("long", "tokens"):
        shutil.copytree(RECORDED / "rl", folder / name)
        (folder / name / "config.toml").write_text(config)
    shutil.copytree(RECORDED / "micro", folder / "micro")
    write_metrics(folder / "long" / "metrics.jsonl", steps)
    random = np.random.default_rng(0)
    sample = Sample(
        token_ids=random.integers(0, 60, tokens),
        mask=np.arange(tokens) >= 8,
        logprobs=-random.exponential(size=tokens),
        versions=np.full(tokens, 4),
        prompt_length=8,
        streams={"advantages": random.normal(size=tokens)},
    )
    rollout = Rollout(env="letters", group_id="g", draw_id=0, episode=0, credited=1, reward=1.0, samples=[sample])
    write_rollouts(folder / "tokens" / "rollouts", STEP, [rollout], [])


@contextmanager
def served(path: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "headrace", "view", str(path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip(), server.pid
        finally:
            server.terminate()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, of its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page_cpu_seconds(session: Any) -> float:
    """Return the CPU time of the page's main thread so far."""
    return next(m["value"] for m in session.send("Performance.getMetrics")["metrics"] if m["name"] == "TaskDuration")


def measure(browser: Any, path: Path, route: str, ready: str, scrolled: str) -> list[str]:
    opened, in_page, in_server, frames = [], [], [], []
    with served(path) as (url, pid):
        for _ in range(REPEATS):
            context = browser.new_context(viewport={"width": 1400, "height": 900})
            page = context.new_page()
            page.goto(url, wait_until="commit")  # exchanges the token
            run = page.evaluate("fetch('api/runs').then(r => r.json()).then(d => d.runs[0].id)") if route else ""
            page.goto("about:blank")
            session = context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            before = page_cpu_seconds(session), cpu_seconds(pid)
            page.goto(url.partition("?")[0] + route.format(run=run), wait_until="commit")
            opened.append(page.evaluate(OPEN, ready) / 1000)
            in_page.append(page_cpu_seconds(session) - before[0])
            in_server.append(cpu_seconds(pid) - before[1])
            frames += page.evaluate(SCROLL, scrolled)
            context.close()
        peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    cells = [" / ".join(f"{value:.2f}" for value in values) for values in (opened, in_page, in_server)]
    ends = (statistics.median(frames), statistics.quantiles(frames, n=20)[-1], max(frames))
    return [*cells, *(f"{value:.0f}" for value in ends), f"{int(peak[1]) / 1024:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=32_000)
    arguments = parser.parse_args()
    program = shutil.which("chromium")
    assert program, "chromium is not installed: sh scripts/install_chromium.sh"
    print("| page | open, s | CPU of the page, s | CPU of the server, s | frame, ms | 95% | worst | server, MB |")
    print("|---|---|---|---|---|---|---|---|")
    with TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch)
        make_runs(folder, arguments.runs, arguments.steps, arguments.tokens)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        rollout = f"#/run/{{run}}/step/{STEP}/rollout/0"
        cases = {
            f"{arguments.runs} runs": (folder / "many", "", "tbody tr:nth-child(40)", "html"),
            f"{arguments.steps} steps": (folder / "long", "#/run/{run}", ".chart:nth-child(2) canvas", "html"),
            f"{arguments.tokens} tokens": (folder / "tokens", rollout, ".token-text span[style]", ".token-text"),
        }
        for name, case in cases.items():
            print(f"| {' | '.join([name, *measure(browser, *case)])} |", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
