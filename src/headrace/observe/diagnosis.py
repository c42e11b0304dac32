"""Diagnosis of a run: why it does not advance, or is slower than it could be. Pure functions of a `RunState`.

The page, the terminal and `headrace doctor` show the same findings. Processes that are stopped or gone explain every
wait for them, so the waits are judged only if all processes work. A run stalls if no process shows a sign of progress
(`signs_of_progress`) for longer than a fixed time, or longer than was usual between two signs in its recent steps. How
long a step takes does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from headrace.observe.run_state import OUT_OF_MEMORY, RunState
from headrace.observe.status import THE_GPU, ObservedStatus, ProcessStatus, activity, duration

STALL_S = 45.0
"""Time without a sign of progress after which a run is stalled."""
SURELY_LONGER = 2.0
"""Multiple of the longest recent time without a sign of progress from which on a run is surely stalled."""
SILENT_S = 30.0
"""Time without a heartbeat after which a process is reported."""
LONG_WAIT_S = 30.0
"""Wait for a device, a disk or episodes from which on it is unusual."""
LONG_WORK = ("starting", "loading", "compiling", "saving")
"""How states begin in which a process shows no progress for long."""
LONG_WORK_S = 300.0
"""Time that these, and the first step, which may compile, may take."""
RECENT_STEPS = 10
"""Steps whose means are judged, and in which the longest time without a sign of progress is the usual one."""
MIN_STEPS = 5
"""Steps before means are judged."""
FULL_BYTES = 32 << 20
"""Free space below which a disk counts as full."""
BEHIND_SHARE = 0.5
"""Share of the time that batches wait for the trainer from which on it is behind."""
SIGNAL_SHARE = 0.1
"""Share of trained rollouts below which groups have no signal."""
SLOW_WRITE_S, SLOW_WRITE_SHARE = 1.0, 0.25
"""Time to write a batch, and its share of the time of a step, from which on the disk is slow."""
FULL_CACHE = 0.9
"""Use of the KV cache from which on memory is what limits an engine."""
CLOCK_S = 3600.0
"""Time for which a clock that was set is reported."""
STARVED_S = 10.0
"""Time without progress from which on an error about memory in a log explains it."""
MIB = 1 << 20


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong with a run."""

    kind: str
    """A name that does not change with the numbers."""
    severity: Literal["problem", "warning"]
    """`problem`: the run does not advance, or will not for long; `warning`: it advances."""
    process: str
    fact: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.process}: {self.fact.rstrip('.')}. {self.fix}".rstrip()


def signs_of_progress(statuses: Mapping[str, ProcessStatus]) -> object:
    """Return a value that changes whenever a process shows progress: its state, what it counts, or its tokens."""
    return [
        (name, status.state, str(status.progress), status.gauges.get("tokens_sampled"))
        for name, status in statuses.items()
    ]


def works_long(status: ProcessStatus) -> bool:
    """Return whether the state of a process may last minutes without a sign of progress."""
    return status.state.startswith(LONG_WORK)


def diagnose(run: RunState, stall_s: float = STALL_S) -> list[Finding]:
    """Return what is wrong, causes before consequences."""
    if not run.is_running:
        return [*_ended(run), *_disk(run), *_pace(run)]
    findings = [*_launcher(run)]
    if not any(finding.kind == "gone" for finding in findings):
        findings += _lost_processes(run, min(stall_s, SILENT_S))
    findings += [*_disk(run), *_servers_and_clocks(run)]
    if not _has_problem(findings):
        findings += [*_reported(run), *_waits(run), *_episodes(run), *_queues(run)]
    if not _has_problem(findings):
        findings += _stall(run, stall_s)
    return [*findings, *_pace(run)]


def _has_problem(findings: Sequence[Finding]) -> bool:
    return any(finding.severity == "problem" for finding in findings)


RESUME = "headrace rl FILE --resume (or sft, dpo) continues from the newest checkpoint."
CONTINUE = "Continue it with kill -CONT {}, or end the debugger that stopped it."


def _ended(run: RunState) -> Iterator[Finding]:
    assert run.heartbeat is not None
    if run.heartbeat.state == "failed":
        yield Finding(
            "failed", "problem", "launcher", f"the run failed: {run.heartbeat.problem or 'see logs/'}", RESUME
        )
        for name, status in run.statuses.items():
            if status.state == "failed" and status.problem:
                yield _failure(run, name, f"it failed: {status.problem}")


def _failure(run: RunState, process: str, fact: str, severity: Literal["problem", "warning"] = "problem") -> Finding:
    """Return the finding of a process that failed, as `out_of_memory` if its message or its log says so."""
    if process in run.memory_errors:
        fact += f". Its log ends with: {run.memory_errors[process][0]}"
    if any(text in fact for text in OUT_OF_MEMORY):  # a restart does not help for long
        fix = (
            "Lower inference.kv_cache_gb, inference.max_running or seq_len, or give it more memory; "
            "headrace rl FILE --dry-run shows the plan of the memory."
        )
        return Finding("out_of_memory", "problem", process, f"out of memory: {fact}", fix)
    return Finding("failed", severity, process, fact, f"logs/{process}.log has the details.")


def _launcher(run: RunState) -> Iterator[Finding]:
    """Yield that the launcher is stopped, gone or silent."""
    beat = run.heartbeat
    if beat is None:
        return
    process = run.processes.get(beat.pid) if beat.host == run.host else None
    if process is not None and process.state == "T":
        fact = f"stopped by a signal (process {beat.pid}); nothing restarts or reports the other processes"
        yield Finding("stopped", "problem", "launcher", fact, CONTINUE.format(beat.pid))
    elif run.silent_s > SILENT_S:
        is_gone = bool(run.processes) and beat.host == run.host and (process is None or process.state == "Z")
        ending = "has ended without a report: it was killed, or the machine went down" if is_gone else "does not report"
        fact = f"no heartbeat for {run.silent_s:.0f} s; it {ending}"
        yield Finding("gone" if is_gone else "silent", "problem", "launcher", fact, RESUME)


def _lost_processes(run: RunState, silent_s: float) -> Iterator[Finding]:
    """Yield processes that are stopped, gone or silent, and those that were restarted since the last progress."""
    for name, how in (run.heartbeat.restarts if run.heartbeat is not None else {}).items():
        yield _failure(run, name, how, "warning")
    for name, status in run.active.items():
        family = _family(run, status)
        stopped = [pid for pid in family if run.processes[pid].state == "T"]
        own = run.processes.get(status.pid) if status.host == run.host else None
        last = f"its last state is: {activity(status)}"
        if stopped:
            ids = " ".join(map(str, stopped))
            what = "" if status.pid in stopped else f" {run.processes[stopped[0]].name}, which it started,"
            fact = f"process{what} {ids} is stopped by a signal; {last}"
            yield Finding("stopped", "problem", name, fact, CONTINUE.format(ids))
        elif status.silent_s >= silent_s:
            fact = f"no heartbeat for {status.silent_s:.0f} s; {last}"
            if run.processes and status.host == run.host and (own is None or own.state == "Z"):
                fix = f"Process {status.pid} has ended; logs/{name}.log has its last words."
            elif own is not None and own.state == "D":
                fix = f"Process {status.pid} waits for a disk or a network file system: check its mount."
            else:
                fix = f"Look at its stack (py-spy dump --pid {status.pid}), or kill it: the launcher restarts it."
            yield Finding("silent", "problem", name, fact, fix)


def _family(run: RunState, status: ObservedStatus) -> list[int]:
    """Return the ids of a process and of those that it started, as far as they are on this host."""
    if status.host != run.host or status.pid not in run.processes:
        return []
    family = [status.pid]
    for member in family:  # grows meanwhile
        family += [pid for pid, process in run.processes.items() if process.parent == member]
    return family


def _disk(run: RunState) -> Iterator[Finding]:
    """Yield that the disk of the run is full, or has no space for another checkpoint."""
    free = run.free_bytes
    if free is None:
        return
    fix = "Free some space; trainer.ckpt.keep_last and orchestrator.keep_rollouts limit what a run keeps."
    if free < FULL_BYTES:
        yield Finding("disk_full", "problem", "disk", f"the disk of the run has {free / MIB:.1f} MiB left", fix)
    elif run.is_running and free < run.checkpoint_bytes:
        sizes = f"{free / MIB:,.0f} MiB left, and a checkpoint takes {run.checkpoint_bytes / MIB:,.0f} MiB"
        yield Finding("disk_full", "warning", "disk", f"the disk of the run has {sizes}", fix)


def _servers_and_clocks(run: RunState) -> Iterator[Finding]:
    """Yield models on other servers that do not answer, and clocks that were set."""
    for name, reason in run.unreachable.items():
        fix = "Start its server again, or correct its base_url; rollouts that need it are dropped meanwhile."
        yield Finding("unreachable", "problem", name, f"the model does not answer: {reason}", fix)
    for name, status in run.active.items():
        if status.clock_jump_s and (age := status.age(status.clock_jump_since)) < CLOCK_S:
            fact = f"the clock of its host was set by {status.clock_jump_s:+,.0f} s, {age:.0f} s ago"
            fix = "Durations are right, times of records and logs are not: check the time service, or a suspended host."
            yield Finding("clock", "warning", name, fact, fix)


def _reported(run: RunState) -> Iterator[Finding]:
    """Yield a lack of memory that was logged since the last progress, or shortly before, and reported problems."""
    still = run.still_s or 0.0
    for name, (_, age_s) in run.memory_errors.items():
        if still >= STARVED_S and age_s <= still + LONG_WAIT_S:
            yield _failure(run, name, f"no progress for {still:.0f} s")
    for name, status in run.active.items():
        if status.problem:
            age, since = status.age(status.problem_since), time.localtime(status.problem_since)
            fact = f"no progress since {time.strftime('%H:%M:%S', since)} ({duration(age)}): {status.problem}"
            yield Finding("reported", "problem" if age >= LONG_WAIT_S else "warning", name, fact)


def _waits(run: RunState) -> Iterator[Finding]:
    """Yield waits for a device or a disk that are longer than usual."""
    for name, status in run.active.items():
        age = status.age(status.waiting_since) if status.waiting_for else 0.0
        if status.waiting_for.startswith(THE_GPU):
            # An engine hands the GPU over between two of its steps, the trainer after one of its own.
            usual = run.usual_s(LONG_WAIT_S if run.history.step_seconds else LONG_WORK_S)
            if age >= LONG_WAIT_S if name == "trainer" else min(age, run.quiet_s) >= usual:
                fix = "The process that holds it hangs: look at its log and its stack (py-spy dump), or kill it."
                yield Finding("gpu", "problem", name, f"waiting for {status.waiting_for} ({age:.0f} s)", fix)
        elif status.waiting_for.endswith("from the disk") and age >= LONG_WAIT_S:
            fix = "The disk or file system of the run directory does not answer: check it, or move the run."
            yield Finding("disk_slow", "problem", name, f"waiting for {status.waiting_for} ({age:.0f} s)", fix)


def _episodes(run: RunState) -> Iterator[Finding]:
    """Yield that environments hang: episodes are in flight, and none of them has a request at an engine."""
    servers = [status for status in run.active.values() if "running" in status.gauges]
    idle = servers and not any(
        status.gauges["running"] or status.gauges["waiting"] or status.waiting_for for status in servers
    )
    for name, status in run.active.items():
        seconds = float(status.gauges.get("oldest_episode_s") or 0.0) + status.silent_s
        moved_s = status.age(status.progress.since) if status.progress else seconds
        waited_s = min(seconds, moved_s, run.quiet_s)
        if idle and status.gauges.get("oldest_episode_env") and waited_s >= run.usual_s(LONG_WAIT_S):
            env, count = status.gauges["oldest_episode_env"], int(status.gauges.get("dispatcher/inflight_train") or 0)
            count += int(status.gauges.get("dispatcher/inflight_eval") or 0)
            fact = (
                f"environment {env!r} hangs: {count} episodes are in flight, the oldest for {seconds:.0f} s, no "
                f"rollout has arrived for {moved_s:.0f} s, and no engine has a request"
            )
            fix = "See what its episodes wait for (a tool, a sandbox, a server); set timeout on the environment."
            yield Finding("environment", "problem", name, fact, fix)


def _queues(run: RunState) -> Iterator[Finding]:
    """Yield engines that have had waiting requests for long."""
    for name, status in run.active.items():
        seconds = float(status.gauges.get("saturated_s") or 0.0)
        if seconds < LONG_WAIT_S:
            continue
        usage = float(status.gauges.get("kv_usage") or 0.0)
        counts = f"{status.gauges['waiting']} requests wait and {status.gauges['running']} run ({seconds:.0f} s)"
        fact = f"the engine is saturated: {counts}, {usage:.0%} of the KV cache is in use"
        fix = "Raise inference.max_running, add servers (headrace scale), or lower max_inflight_rollouts."
        if usage >= FULL_CACHE:
            fix = "Its memory is full: raise inference.kv_cache_gb, add servers (headrace scale), or shorten answers."
        yield Finding("saturated", "warning", name, fact, fix)


def _stall(run: RunState, stall_s: float) -> Iterator[Finding]:
    """Yield that no process has shown progress for longer than is usual in this run."""
    if run.heartbeat is None:
        return
    recent = run.history.step_seconds[-RECENT_STEPS:]
    working = [status for status in run.active.values() if not status.waiting_for and "running" not in status.gauges]
    is_long = any(not recent or works_long(status) for status in working)
    # Engines may sample for ever what becomes no rollout.
    is_endless = bool(recent) and not is_long and (run.still_s or 0.0) >= max(stall_s, 3 * max(recent))
    if run.quiet_s < run.usual_s(stall_s) and not is_endless:
        return
    is_sure = is_endless or run.quiet_s >= run.usual_s(LONG_WORK_S if is_long else stall_s, SURELY_LONGER)
    steps = f"recent steps took up to {max(recent):.0f} s" if recent else "no step has finished yet"
    doings = "; ".join(f"{name}: {activity(status)}" for name, status in run.active.items())
    fact = f"no progress for {run.still_s:.0f} s ({steps}). {doings or 'No process has reported anything yet'}"
    yield Finding("stalled", "problem" if is_sure else "warning", "run", fact, "The logs are in logs/.")


def _pace(run: RunState) -> Iterator[Finding]:
    """Yield what recent steps say about signal, trainer and disk."""
    steps = list(run.history.steps.values())[-RECENT_STEPS:]
    if len(steps) < MIN_STEPS:
        return

    def mean(name: str) -> float | None:
        values = [float(step[name]) for step in steps if step.get(name) is not None]
        return sum(values) / len(values) if values else None

    batch = mean("time/batch") or 0.0
    trained = mean("effective_batch_size")
    if trained is not None and trained < SIGNAL_SHARE:
        solved = (
            f"{mean('solve_all') or 0.0:.0%} of the groups are solved by all, {mean('solve_none') or 0.0:.0%} by none"
        )
        fact = f"{trained:.0%} of the rollouts of the last {len(steps)} steps have a signal; {solved}"
        fix = "Take easier or harder tasks, give partial credit, raise group_size, or filter with a curriculum."
        yield Finding("no_signal", "warning", "orchestrator", fact, fix)
    waits, writes = mean("time/wait_for_weights") or 0.0, mean("time/write_batch") or 0.0
    shares_device = any("hand_overs" in status.gauges for status in run.statuses.values())
    if waits > BEHIND_SHARE * batch and not shares_device:
        fact = f"behind: batches of the last {len(steps)} steps waited {waits:.1f} s of {batch:.1f} s for its weights"
        fix = "Train on more ranks, give inference fewer GPUs, or raise orchestrator.max_async_level."
        yield Finding("trainer_behind", "warning", "trainer", fact, fix)
    if writes >= SLOW_WRITE_S and writes > SLOW_WRITE_SHARE * batch:
        fact = f"slow: writing a batch took {writes:.1f} s of {batch:.1f} s in the last {len(steps)} steps"
        yield Finding("disk_slow", "warning", "disk", fact, "Move output_dir to a faster disk, or keep less per step.")


class Notices:
    """Decides when findings are printed as lines: once, then at growing intervals while they last. Takes the time."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[float, float]] = {}
        """By kind and process: when it was first found, and after which time it is printed next."""

    def due(self, findings: Sequence[Finding], now: float) -> list[Finding]:
        """Return the findings to print now; of what a process reports, only what lasts."""
        keys = {(finding.kind, finding.process) for finding in findings}
        self._seen = {key: entry for key, entry in self._seen.items() if key in keys}
        due = []
        for finding in findings:
            key = (finding.kind, finding.process)
            may_pass = finding.kind == "reported" and finding.severity == "warning"
            since, next_s = self._seen.setdefault(key, (now, 0.0))
            lasted = now - since
            if lasted >= next_s and not may_pass:
                self._seen[key] = (since, max(2 * lasted, LONG_WAIT_S))
                due.append(finding)
        return due
