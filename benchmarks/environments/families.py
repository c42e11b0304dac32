"""A probe of every reasoning-gym family: does it load, does gold earn 1, do hostile answers break it or pay? One table.

    python benchmarks/environments/families.py --output docs/how-to/reasoning-gym.md

Whole replies are the answers here (`terse`), so that every hostile text reaches the family's scorer. One family at a
time, each in a process that ends after `--limit` seconds. The table is the end of the output; a family that is in it
already is not probed again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from headrace.environments.adapters import import_library
from headrace.errors import Failure
from headrace.tools.probe.findings import list_findings
from headrace.tools.probe.report import ProbeReport
from headrace.tools.probe.runner import probe

HEADER = "| family | loads | gold earns | hostile answers | slowest score | probed in |\n|---|---|---|---|---|---|\n"
SCORER_FAILED = re.compile(r"answers that its scorer failed on \((.*)\): \d+ so far")
TIMEOUT = 60.0
"""Seconds for one episode, so that a busy machine is not taken for a slow scorer."""
SLOW = ("futoshiki", "intermediate_integration", "knight_swap", "puzzle24", "sokoban", "zebra_puzzles")
"""Families that take a tenth of a second or more for a task: they are asked for fewer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/families.md"))
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one family")
    parser.add_argument("--only", nargs="*", metavar="FAMILY", help="these alone, not all")
    parser.add_argument("--one", metavar="FAMILY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(asyncio.run(probed(options.one))))
        return
    names = options.only or sorted(import_library("reasoning_gym", "reasoning-gym").factory.DATASETS)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, 1):
        before, rows = read(options.output)
        if name not in rows:
            line = row(name, options.limit)
            before, rows = read(options.output)  # somebody may have written to the page meanwhile
            rows[name] = line
            options.output.write_text(before + HEADER + "".join(f"{rows[known]}\n" for known in sorted(rows)))
        print(f"{number}/{len(names)} {rows[name]}", flush=True)


def read(page: Path) -> tuple[str, dict[str, str]]:
    """What is before the table, and its rows by family."""
    before, _, table = (page.read_text() if page.exists() else "").partition(HEADER)
    return before, {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}


def row(name: str, limit: float) -> str:
    """The family's line of the table, by a process that can be given up."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=True)
        cells = shown(json.loads(done.stdout), SCORER_FAILED.findall(done.stderr))
    except subprocess.TimeoutExpired:
        cells = [f"not within {limit:g} s", "", "", ""]
    return f"| {' | '.join([name, *cells])} | {time.perf_counter() - started:.0f} s |"


def shown(told: dict[str, Any], scorer_errors: Sequence[str]) -> list[str]:
    if "refused" in told:
        return [f"refused: {told['refused'].partition(': ')[2] or told['refused']}", "", "", ""]
    remarks = list(told["problems"])
    if scorer_errors:
        late = "took longer than" in scorer_errors[0]
        remarks.append("the scorer is killed in time" if late else f"the scorer raises {cut(scorer_errors[0])}")
    gold = f"{told['gold']:g}" if told["gold"] is not None else "-"
    slowest = f"{1000 * told['slowest']:,.0f} ms"
    return [f"{told['load']:.1f} s", gold, "; ".join(remarks) or "earn less, none breaks it", slowest]


def cut(words: str, most: int = 70) -> str:
    plain = words.encode("ascii", "replace").decode().replace("|", "\\|").replace("\n", " ")
    plain = "".join(letter for letter in plain if letter.isprintable())
    return plain if len(plain) <= most else f"{plain[:most]}..."


async def probed(name: str) -> dict[str, Any]:
    """What the table needs of a probe."""
    tasks = 8 if name in SLOW else 32
    try:
        args = {"num_tasks": tasks, "terse": True}
        report, _ = await probe(f"reasoning-gym:{name}", args, tasks=16, examples=3, timeout=TIMEOUT)
    except Failure as error:
        return {"refused": str(error)}
    gold = [episode.reward for episode in report.of("gold") if episode.reward is not None]
    opening = report.opening
    return {
        "load": opening.import_seconds + opening.load_seconds + opening.tasks_seconds,
        "gold": fmean(gold) if gold else None,
        "slowest": max(episode.seconds for episode in report.episodes),
        "problems": problems(report),
    }


def problems(report: ProbeReport) -> list[str]:
    """What the probe calls an error or a warning."""
    return [cut(finding.seen, 110) for finding in list_findings(report) if finding.severity != "note"]


if __name__ == "__main__":
    main()
