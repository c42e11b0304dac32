"""Hosts on this machine: namespaces with their own network, host name, processes, /tmp and /dev/shm, on one bridge.

A host lives as long as its first process, which the kernel kills together with the test session; the network of a
host disappears with it. Needs Linux and root.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

REPOSITORY = Path(__file__).parents[2]
LOCK = "/var/lock/headrace-hosts-{set}.lock"
"""Held by the session that has this set of hosts, with its bridge and its subnet."""
MAX_SETS = 8
TOOLS = ("ip", "nsenter", "unshare", "setpriv", "mount")
FIRST_PROCESS = """
hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount -t tmpfs shm /dev/shm; mount --rbind "$2/tmp" /tmp
ip link set lo up; trap : TERM; touch "$2/ready"
while :; do sleep 86400 & wait; done  # bash also reaps what other processes leave behind
"""


def missing_for_hosts() -> str | None:
    """Return why hosts cannot be made on this machine, or None."""
    if sys.platform != "linux":
        return "namespaces need Linux"
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install iproute2 util-linux)"
    probe = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"namespaces are not allowed here: {probe.stderr.strip()}" if probe.returncode else None


class NamespacedHost:
    """One host. Commands on it are children of this process, except for what they detach."""

    def __init__(self, number: int, set_number: int, directory: Path, shared: Sequence[Path]) -> None:
        self.number, self.name, self.address = number, f"host{number}", f"10.{80 + set_number}.0.{number}"
        self._directory, self._shared = directory / f"host{number}", shared
        self._bridge, self._link = f"hr{set_number}-br", f"hr{set_number}-{number}"
        self._first: subprocess.Popen[bytes] | None = None
        self._commands: list[subprocess.Popen[str]] = []
        self.pid = 0
        """Of its first process, outside of the namespace."""

    def start(self, host_file: str) -> None:
        """Boot it, also again after `kill`, with an empty /tmp."""
        shutil.rmtree(self._directory, ignore_errors=True)
        (self._directory / "tmp").mkdir(parents=True)
        (self._directory / "tmp").chmod(0o1777)
        (self._directory / "hosts").write_text(host_file)
        mounts = ""
        for path in self._shared:
            if path.is_relative_to("/tmp"):  # hosts have their own, but share this part of it
                inside = self._directory / "tmp" / path.relative_to("/tmp")
                inside.mkdir(parents=True, exist_ok=True)
                mounts += f"mount --rbind '{path}' '{inside}'\n"
        spaces = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        first = ["bash", "-ec", mounts + FIRST_PROCESS, "_", self.name, str(self._directory)]
        with open(self._directory / "boot.log", "wb") as log:
            command = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, *first]
            self._first = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for((self._directory / "ready").exists, f"{self.name} to start", self._first)
        self.pid = int(Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text())
        # The same hardware address after a restart: the others remember it for minutes.
        peer = ["peer", "name", "eth0", "address", f"02:00:00:00:00:{self.number:02x}", "netns", str(self.pid)]
        ip("link", "add", self._link, "type", "veth", *peer)
        ip("link", "set", self._link, "master", self._bridge, "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def popen(
        self,
        *command: object,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        output: IO[bytes] | int = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a command on the host; `env` is added to that of this process."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--ipc", "--pid", f"--wdns={cwd}"]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *enter, *map(str, command)],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._commands.append(process)
        return process

    def run(
        self, *command: object, env: Mapping[str, str] | None = None, timeout: float = 60, check: bool = True
    ) -> str:
        """Run a command to its end and return its output, stripped."""
        process = self.popen(*command, env=env)
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert not check or process.returncode == 0, f"{self.name}: {command} -> {process.returncode}:\n{output}"
        return output.strip()

    def pids(self) -> list[int]:
        """Return the processes on it, with their ids outside of the namespace."""
        own, found = os.stat(f"/proc/{self.pid}/ns/pid").st_ino, []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    is_own = (entry / "ns" / "pid").stat().st_ino == own
                except OSError:  # it has ended
                    continue
                found += [int(entry.name)] * is_own
        return found

    def send_signal(self, number: int, containing: str = "") -> list[int]:
        """Signal the processes whose command line contains a text, except the first process; return their ids."""
        hit = []
        for pid in self.pids():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if pid != self.pid and containing in command:
                    os.kill(pid, number)
                    hit.append(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return hit

    def kill(self) -> None:
        """Cut the power: the kernel kills every process on it, and its network is gone."""
        if self._first is not None and self._first.poll() is None:
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
            else:
                self._first.kill()
            for process in self._commands:
                process.send_signal(signal.SIGCONT)  # nsenter, which stops together with its command; it must reap it
            self._commands.clear()
            self._first.wait()
        subprocess.run(["ip", "link", "del", self._link], capture_output=True)  # at once; the kernel is lazy

    def cut_link(self) -> None:
        ip("link", "set", self._link, "down")

    def join_link(self) -> None:
        ip("link", "set", self._link, "up")


class HostSet:
    """Hosts `host1` to `hostN` in `directory`, which all of them see, as they see the paths in `shared`."""

    def __init__(self, count: int, directory: Path, shared: Sequence[Path] = ()) -> None:
        self._set, self._lock = take_set()
        seen = (directory, REPOSITORY, Path(sys.prefix), *shared)
        self.hosts = [NamespacedHost(number, self._set, directory, seen) for number in range(1, count + 1)]
        self._host_file = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self.hosts)

    def __enter__(self) -> HostSet:
        try:
            self._delete_links()  # those of a session that was killed
            ip("link", "add", f"hr{self._set}-br", "type", "bridge")
            ip("link", "set", f"hr{self._set}-br", "up")
            for host in self.hosts:
                host.start(self._host_file)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self.hosts:
            host.kill()
        self._delete_links()
        self._lock.close()

    def __getitem__(self, number: int) -> NamespacedHost:
        """Return host `number`, from 1."""
        return self.hosts[number - 1]

    def add_own_address(self) -> str:
        """Give this machine an address that the hosts reach, and return it."""
        address = self[1].address.rpartition(".")[0] + ".254"
        ip("addr", "add", f"{address}/24", "dev", f"hr{self._set}-br")
        return address

    def restart(self, number: int) -> None:
        self[number].kill()
        self[number].start(self._host_file)

    def _delete_links(self) -> None:
        for name in (f"hr{self._set}-br", *(f"hr{self._set}-{host.number}" for host in self.hosts)):
            subprocess.run(["ip", "link", "del", name], capture_output=True)


def take_set() -> tuple[int, IO[str]]:
    """Return the number of a set of hosts that no other session has, and its lock; the kernel releases it, too."""
    for number in range(MAX_SETS):
        lock = Path(LOCK.format(set=number)).open("w")  # noqa: SIM115 (it stays open)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number, lock
        except BlockingIOError:
            lock.close()
    raise AssertionError(f"{MAX_SETS} sessions have hosts of their own")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def wait_for(
    condition: object, what: str, process: subprocess.Popen[bytes] | None = None, timeout: float = 30.0
) -> None:
    """Wait for `condition()`; raises `AssertionError` after `timeout` seconds, or if `process` ends before."""
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert process is None or process.poll() is None, f"{what}: its process ended with {process.poll()}"
        assert time.monotonic() < deadline, f"{what}: not within {timeout:g} s"
        time.sleep(0.02)
