"""`headrace doctor`: what each process of a run does, what it waits for, and what is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from headrace.launch.run_directory import find_run
from headrace.observe.diagnosis import diagnose
from headrace.observe.run_state import RunReader, last_lines
from headrace.observe.status import activity, duration
from headrace.transport.run_dir import RunDir


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = "Exit status: 0 no problem, 1 a problem was found, 2 RUN is not a run. See docs/how-to/doctor.md."


def run_doctor(arguments: argparse.Namespace) -> int:
    run = RunDir(find_run(arguments.run))
    state = RunReader(run).read(connect=True)
    findings = diagnose(state)
    last_line = {name: (last_lines(run.logs / f"{name}.log") or [""])[-1] for name in state.statuses}
    beat = state.heartbeat
    if arguments.json:
        processes = {
            name: {"activity": activity(status), "last_log_line": last_line[name]}
            for name, status in state.statuses.items()
        }
        report = {"state": beat.state if beat else None, "processes": processes, "findings": findings}
        print(msgspec.json.encode(report).decode())
    else:
        steps = f"step {max(state.history.step, beat.step if beat else 0)}"
        still = (
            f", last progress {duration(state.still_s)} ago" if state.is_running and state.still_s is not None else ""
        )
        print(f"{run.root.resolve().name}: {beat.state if beat else 'no heartbeat'}, {steps}{still}")
        for name, status in state.statuses.items():
            print(f"  {name}: {activity(status)}")
            if last_line[name]:
                print(f"    {last_line[name]}")
        for finding in findings:
            print(f"{finding.severity}: {finding.process}: {finding.fact}")
            if finding.fix:
                print(f"  try: {finding.fix}")
        if not findings:
            print("no problem found")
    return int(any(finding.severity == "problem" for finding in findings))
