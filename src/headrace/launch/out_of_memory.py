"""Processes that the kernel ended because host memory was short: recognized, described, and not restarted in vain.

The kernel counts the processes that it ends. A process ended by SIGKILL shortly after the count has risen was ended for
memory. Where the count cannot be read or does not rise (some container runtimes), the memory that the process had used
is taken as evidence.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from headrace.errors import AGAIN
from headrace.launch.hosts.base import HostProcess, MemoryAtEnd
from headrace.machine import HostMemory

GIB = 1 << 30
MEMORY_ADVICE = "`headrace rl FILE --dry-run` shows what the run plans to use, and what would make it less."
MOST_OF_THE_MEMORY = 0.5
"""Share of the memory from which on a process is the cause itself, whatever else runs beside it."""
RECENT_S = 60.0
"""How long before the end of a process the count may have risen: a process with much memory takes seconds to end."""
KILLED_STATUSES = (-signal.SIGKILL, 128 + signal.SIGKILL, AGAIN)
"""How a process ends if it, or a child of it, was ended by SIGKILL."""


@dataclass(frozen=True)
class OutOfMemory:
    """The end of a process for lack of memory."""

    process: str
    peak_bytes: int
    total_bytes: int
    """Memory of the machine, or the limit of its container."""
    activity: str
    """What the process was doing."""
    is_certain: bool
    """Whether the kernel has counted it."""

    @property
    def repeats(self) -> bool:
        """Whether a restarted process would come to the same end: it used most of the memory itself."""
        return self.is_certain and self.peak_bytes >= MOST_OF_THE_MEMORY * self.total_bytes

    def __str__(self) -> str:
        killer = "by the kernel" if self.is_certain else "by SIGKILL, probably by the kernel"
        doing = f" while it was {self.activity}" if self.activity else ""
        peak, total = self.peak_bytes / GIB, self.total_bytes / GIB
        use = f"It used up to {peak:.1f} GiB of {total:.1f} GiB of memory"
        return f"{self.process} was ended {killer}: out of memory{doing}. {use}"


class OomMonitor:
    """Follows the kernel's count, and tells the end of a process for memory from other ends. Takes the time."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._count = memory.oom_kills()
        self._risen_at: float | None = None

    def observe(self, now: float) -> None:
        """Read the count."""
        count = self._memory.oom_kills()
        if count is not None and self._count is not None and count > self._count:
            self._risen_at = now
        self._count = count

    def at_end(self, now: float) -> MemoryAtEnd:
        """Return the evidence about a process of this machine that has ended."""
        self.observe(now)
        has_risen = self._risen_at is not None and now - self._risen_at <= RECENT_S
        return MemoryAtEnd(self._memory.total(), has_risen)

    def explain(self, process: HostProcess, activity: str, now: float) -> OutOfMemory | None:
        """Describe the end of a process if it was for memory, by the report of its host if that is another one."""
        if process.exit_status not in KILLED_STATUSES:
            return None
        memory = self.at_end(now) if process.is_here else process.memory
        if memory is None:  # its host is lost
            return None
        total = memory.total_bytes
        was_large = process.exit_status != AGAIN and process.peak_bytes >= MOST_OF_THE_MEMORY * total
        if not memory.was_short and not was_large:
            return None
        return OutOfMemory(process.name, process.peak_bytes, total, activity, is_certain=memory.was_short)
