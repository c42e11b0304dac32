"""Start the processes of a run, restart those that crash, detect a stalled run, and stop all of them in order.

A process that a signal ended, or that exits with status `AGAIN` (a server whose engine died), is restarted alone: its
state is in the run directory, and the other processes wait for it. Any other failure ends the run. `Watch` and
`Restarts` are pure: they take the time. Messages about a stall report what each process is doing, not a cause.

A process that the kernel ended for memory is restarted once, in case another program had taken the memory, and not at
all if it used most of the memory itself.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from headrace.errors import AGAIN, BAD_INPUT, RESTART_RUN
from headrace.launch.errors import InputRefused, LaunchError, RestartNeeded
from headrace.launch.heartbeat import Heartbeat
from headrace.launch.hosts.base import HostProcess, Hosts, ProcessSpec
from headrace.launch.out_of_memory import OomMonitor, OutOfMemory
from headrace.machine import HostMemory
from headrace.observe.metrics import History, Tail
from headrace.observe.status import ObservedStatus, StatusReader, is_up
from headrace.observe.terminal import View, activity
from headrace.transport.endpoint import withdraw_endpoint
from headrace.transport.run_dir import RunDir

POLL_S = 0.1
RESTART_DELAY_S = 1.0
"""By how much the delay grows with every restart without progress; the first has none."""
MAX_RESTART_DELAY_S = 60.0
STALL_S = 60.0
"""Time without a heartbeat or progress before the first message; the interval then doubles."""
MEMORY_ADVICE = "`headrace rl FILE --dry-run` shows what the run plans to use, and what would make it less."
RECENT_STEPS = 10
"""Number of steps whose longest duration, times three, is not yet a stall."""


class Watch:
    """Remembers the last progress, and when each message was last returned."""

    def __init__(self, now: float, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._progress: object = (0, [])
        self._moved_at = now
        self._next_stall = 0.0
        self._next_silence: dict[str, float] = {}

    def find_problems(
        self, now: float, progress: int, statuses: Mapping[str, ObservedStatus], step_seconds: Sequence[float] = ()
    ) -> list[str]:
        """Return messages about silent processes and a stalled run.

        `progress` is any number that grows as the run proceeds; `step_seconds` are the durations of past steps.
        Micro-batches and rollouts count as progress. The view shows problems that processes report themselves.
        """
        sentences = []
        for name, status in statuses.items():
            silent = status.silent_s
            if silent < self._stall_s:
                self._next_silence.pop(name, None)
            elif silent >= self._next_silence.get(name, self._stall_s):
                sentences.append(f"{name}: no heartbeat for {silent:.0f} s; its last state is: {status.state}")
                self._next_silence[name] = 2 * silent
        moves = (progress, [(name, str(status.progress)) for name, status in statuses.items() if status.progress])
        if moves != self._progress or any(status.problem for status in statuses.values()):
            self._progress, self._moved_at, self._next_stall = moves, now, 0.0
        still = now - self._moved_at
        longest = max(step_seconds[-RECENT_STEPS:], default=0.0)
        if still >= max(self._next_stall, self._stall_s, 3 * longest):
            self._next_stall = 2 * still
            steps = f"recent steps took up to {longest:.0f} s" if step_seconds else "no step has finished yet"
            doings = "; ".join(f"{name}: {activity(status)}" for name, status in statuses.items())
            doings = doings or "No process has reported anything yet"
            sentences.append(f"no progress for {still:.0f} s ({steps}). {doings}")
        return sentences


def not_up(names: Sequence[str], statuses: Mapping[str, ObservedStatus]) -> list[str]:
    """Return the processes that are still starting, each with its activity."""
    missing = []
    for name in names:
        status = statuses.get(name)
        if not is_up(status):
            missing.append(f"{name} ({'has not reported yet' if status is None else activity(status)})")
    return missing


class Restarts:
    """Counts the restarts of each process since the last progress, and schedules them. Pure: takes the time."""

    def __init__(self, most: int, delay_s: float = RESTART_DELAY_S) -> None:
        self.most = most
        self.in_a_row: dict[str, int] = {}
        self.due: dict[str, float] = {}
        """By process: when it is restarted."""
        self.out_of_memory: set[str] = set()
        """Processes that were ended for memory since the last progress."""
        self._delay_s = delay_s
        self._furthest = 0

    def record_progress(self, history: History) -> None:
        """Reset the counts if the run has got further. Steps repeated after a restart do not count."""
        reached = history.step + max(history.steps, default=0) + sum(map(len, history.evals.values()))
        if reached > self._furthest:
            self._furthest = reached
            self.in_a_row.clear()
            self.out_of_memory.clear()

    def allows(self, name: str, out_of_memory: OutOfMemory | None = None) -> bool:
        """Return whether a process may be restarted, after an end for memory only once, if at all."""
        if out_of_memory is not None and (out_of_memory.repeats or name in self.out_of_memory):
            return False
        return self.in_a_row.get(name, 0) < self.most

    def schedule(self, name: str, now: float) -> float:
        """Schedule a restart, and return the seconds until then."""
        before = self.in_a_row.get(name, 0)
        self.in_a_row[name] = before + 1
        delay_s = min(before * self._delay_s, MAX_RESTART_DELAY_S)
        self.due[name] = now + delay_s
        return delay_s

    def take_due(self, now: float) -> list[str]:
        """Remove and return the processes that are to be restarted now."""
        names = [name for name, due_at in self.due.items() if due_at <= now]
        for name in names:
            del self.due[name]
        return names


class Supervisor:
    """Starts `specs` on `hosts` in order, and stops them in reverse order."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        hosts: Hosts,
        run: RunDir,
        view: View,
        *,
        start_timeout: float,
        stop_timeout: float,
        max_restarts: int,
        restart_delay_s: float = RESTART_DELAY_S,
        stall_s: float = STALL_S,
        heartbeat: Heartbeat | None = None,
        memory: HostMemory | None = None,
        memory_advice: str = MEMORY_ADVICE,
    ) -> None:
        """`memory_advice`: a sentence on what makes the run need less host memory."""
        self.history = History()
        self._specs, self._hosts, self._run, self._view = specs, hosts, run, view
        self._start_timeout, self._stop_timeout = start_timeout, stop_timeout
        self._heartbeat = heartbeat or Heartbeat(run.heartbeat)
        self._tail, self._reader = Tail(run.metrics), StatusReader(run.status)
        self._processes: dict[str, HostProcess] = {}
        """By name, in the order of their first start."""
        self._up: set[str] = set()
        self._killed: set[HostProcess] = set()
        """Processes that were killed because they had failed and did not end."""
        self._restarts = Restarts(max_restarts, restart_delay_s)
        self._oom, self._memory_advice = OomMonitor(memory or HostMemory()), memory_advice
        self._statuses: dict[str, ObservedStatus] = {}
        self._notices_shown: Counter[int] = Counter()
        """By process id."""
        self._signals: list[int] = []
        self._watch = Watch(time.monotonic(), stall_s)

    def run(self) -> int:
        """Return 0 when the work is done, or 128 + N after signal N. Raises `LaunchError` when a process fails."""
        state, problem = "failed", None
        with signals_to(self._signals):
            try:
                self._start()
                code = self._supervise()
                state = "stopped" if code else "finished"
                return code
            except LaunchError as error:
                problem = str(error).partition("\n")[0]
                raise
            finally:
                try:
                    self._stop()
                finally:
                    self._heartbeat.close(state, problem)
                    self._view.close(self.history, self._statuses)
                    self._hosts.close()

    def _start(self) -> None:
        for stale in (*self._run.status.rglob("*.json"), *self._run.endpoints.glob("*.json")):
            stale.unlink(missing_ok=True)
        self._read()
        self._view.say(f"starting {', '.join(spec.name for spec in self._specs)}; logs in {self._run.logs}")
        for spec in self._specs:
            self._start_process(spec)

    def _start_process(self, spec: ProcessSpec) -> None:
        log = self._run.logs / f"{spec.name}.log"
        self._processes[spec.name] = self._hosts.start(spec, log)
        self._up.discard(spec.name)
        self._started = time.monotonic()  # of the last one: other processes may wait for it to come up

    def _supervise(self) -> int:
        while not self._signals:
            # Before the statuses are read, so that they include the last report of a process that has ended.
            running = [process for process in self._processes.values() if process.running]
            ended = [process for process in self._processes.values() if process not in running]
            self._read()
            self._oom.observe(time.monotonic())
            self._view.show(self.history, self._statuses)
            problem = next((status.problem for status in self._statuses.values() if status.problem), "")
            self._heartbeat.update(self.history.step, self.history.moves, problem)
            finished = [process for process in ended if process.exit_status == 0 and not self._has_failed(process)]
            if all(process.spec.service or process in finished for process in self._processes.values()):
                return 0
            self._handle_ended(ended)
            self._check(running)
            for name in self._restarts.take_due(time.monotonic()):
                self._start_process(self._processes[name].spec.again())
            time.sleep(POLL_S)
        names = ", ".join(process.name for process in reversed(self._processes.values()) if process.running)
        self._view.say(f"{signal.Signals(self._signals[0]).name}: stopping {names or '(no process is running)'}")
        return 128 + self._signals[0]

    def _read(self) -> None:
        for record in self._tail.read():
            self.history.add(record)
        self._restarts.record_progress(self.history)
        self._statuses = self._reader.read()
        for status in self._statuses.values():
            for notice in status.notices[self._notices_shown[status.pid] :]:
                self._view.say(f"{status.process}: {notice}")
            self._notices_shown[status.pid] = len(status.notices)

    def _handle_ended(self, ended: list[HostProcess]) -> None:
        """Schedule restarts of crashed processes; raise `LaunchError` if one cannot be restarted."""
        died = [p for p in ended if p.exit_status != 0 or p.spec.service or self._has_failed(p)]
        died = [process for process in died if process.name not in self._restarts.due]
        if repaired := [process.name for process in died if process.exit_status == RESTART_RUN]:
            raise RestartNeeded(f"{', '.join(repaired)} set a damaged file aside")
        # A restart does not help after a process has reported its failure.
        crashed = [p for p in died if p.exit_status == AGAIN or (p.was_killed and not self._has_failed(p))]
        out_of_memory = {process: self._find_out_of_memory(process) for process in died}
        allowed = all(self._restarts.allows(process.name, out_of_memory[process]) for process in died)
        if len(crashed) < len(died) or not allowed:
            error = InputRefused if any(process.exit_status == BAD_INPUT for process in died) else LaunchError
            raise error("\n".join(self._describe_failure(process, out_of_memory[process]) for process in died))
        for process in died:
            process.kill()  # its children, too
            ranks = (self._run.status / "ranks").glob(f"{process.name}-*.json")
            for status in (self._run.status / f"{process.name}.json", *ranks):
                status.unlink(missing_ok=True)
            withdraw_endpoint(self._run.endpoints / f"{process.name}.json", process.pid)
            delay_s = self._restarts.schedule(process.name, time.monotonic())
            when = f"restarting it in {delay_s:g} s" if delay_s else "restarting it"
            attempt = f"{self._restarts.in_a_row[process.name]} of {self._restarts.most}"
            if out_of_memory[process] is not None:
                self._restarts.out_of_memory.add(process.name)
            how = out_of_memory[process] or f"{process.name} {process.how_it_ended()}"
            self._view.say(f"{how}; {when} ({attempt})")

    def _has_failed(self, process: HostProcess) -> bool:
        """Whether the process has reported its failure."""
        if process in self._killed:
            return True
        status = self._statuses.get(process.name)
        return status is not None and status.pid == process.pid and status.state == "failed"

    def _find_out_of_memory(self, process: HostProcess) -> OutOfMemory | None:
        """Return how the process ended for lack of memory; None if it ended in another way, or was killed by us."""
        if process in self._killed:
            return None
        status = self._statuses.get(process.name)
        doing = "" if status is None or status.pid != process.pid or status.state == "failed" else status.state
        return self._oom.explain(process, doing, time.monotonic())

    def _describe_failure(self, process: HostProcess, out_of_memory: OutOfMemory | None) -> str:
        head = str(out_of_memory or f"{process.name} {process.how_it_ended()}")
        if restarts := self._restarts.in_a_row.get(process.name):
            head += f" after {restarts} restart{'s' * (restarts > 1)} without progress"
        advice = [] if out_of_memory is None else [self._memory_advice]
        lines = [f"    {line}" for line in process.last_lines()]
        if not lines:
            return "\n".join([f"{head} and wrote no log", *advice])
        return "\n".join([f"{head}; the end of {process.log}:", *lines, *advice])

    def _check(self, running: list[HostProcess]) -> None:
        """Raise `LaunchError` if a process does not come up in time; show warnings about a stalled run."""
        names = [process.name for process in running]
        self._up.update(name for name in names if is_up(self._statuses.get(name)))
        missing = not_up([name for name in names if name not in self._up], self._statuses)
        if missing and time.monotonic() - self._started > self._start_timeout:
            limit = f"not up after {self._start_timeout:.0f} s (launch.start_timeout)"
            raise LaunchError(f"{limit}: {', '.join(missing)}; their logs are in {self._run.logs}")
        alive = {name: status for name, status in self._statuses.items() if name in names}
        for sentence in self._watch.find_problems(
            time.monotonic(), self.history.moves, alive, self.history.step_seconds
        ):
            self._view.say(sentence)
        for process in running:
            status = alive.get(process.name)
            if status is not None and status.state == "failed" and status.silent_s > self._stop_timeout:
                # It has failed, but a thread or another rank keeps it alive.
                self._killed.add(process)
                process.kill()

    def _stop(self) -> None:
        """Stop running processes, last started first. A second signal kills them at once."""
        for process in reversed(self._processes.values()):
            process.terminate()
            deadline = time.monotonic() + self._stop_timeout
            while process.running and time.monotonic() < deadline and len(self._signals) < 2:
                time.sleep(0.02)
            if process.running:
                self._view.say(f"{process.name} did not stop and is killed")
            process.kill()  # even if it has ended: its children may still run
            process.wait(self._stop_timeout)
        self._read()


@contextmanager
def signals_to(received: list[int]) -> Iterator[None]:
    """Append received stop signals to a list instead of ending the process."""

    def collect(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it stays ignored
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
