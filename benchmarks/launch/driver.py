"""What node agents cost the launcher: CPU of the driver, and delays of commands, by the number of hosts.

    python benchmarks/launch/driver.py [--hosts 4 16 64] [--seconds 10]

The driver is in this process; another one reports for all hosts, each over its own connection, as agents do. CPU
seconds are those of this process, per second of wall-clock time. A delay is the time from a command until its host has
it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.launch.driver import Driver
from headrace.launch.driver_client import DriverClient, find_driver
from headrace.launch.node_messages import Join, Joined, Orders, Report, RunFacts, Signal
from headrace.machine import own_versions
from headrace.transport.run_dir import RunDir
from headrace.transport.shared_directory import Canary

TIMEOUT_S = 30.0


def act_as_host(root: Path, name: str) -> None:
    """Join, then report for ever. A command is reported as done in the next report."""
    client = DriverClient(find_driver(root))
    run = client.get("/run", RunFacts, TIMEOUT_S)
    Canary(Path(run.directory), run.canary).check(name)
    facts = Join(name, "127.0.0.1", 1, (), 1, "python", own_versions(), time.time())
    client.post(f"/nodes/{name}", facts, Joined, TIMEOUT_S)
    done, dialed = 0, dict[str, str]()
    while True:
        report = Report(name, done=done, dialed=dialed, free_ports=list(range(40000, 40008)))
        orders = client.post(f"/nodes/{name}/report", report, Orders, TIMEOUT_S)
        dialed = {getattr(command, "nonce", ""): "" for _, command in orders.commands}
        done = max([done, *(number for number, _ in orders.commands)])


def act_as_hosts(root: Path, count: int) -> None:
    threads = [threading.Thread(target=act_as_host, args=(root, f"h{number}"), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    threading.Event().wait()


@contextmanager
def hosts(root: Path, count: int) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=act_as_hosts, args=(root, count), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def measure(root: Path, count: int, seconds: float) -> tuple[float, list[float]]:
    """Return the CPU seconds per second, and the delays of commands."""
    driver = Driver(RunDir(root), is_alone=True)
    try:
        with hosts(root, count):
            while len(driver.nodes.usable()) < count:
                time.sleep(0.1)
            cpu, started, delays = time.process_time(), time.monotonic(), []
            while (elapsed := time.monotonic() - started) < seconds:
                node, sent_at = driver.nodes.usable()[len(delays) % count], time.monotonic()
                driver.send(node, Signal(0, 0))
                while node.commands:  # until the report after it
                    time.sleep(0.001)
                delays.append(time.monotonic() - sent_at)
                time.sleep(0.1)
            return (time.process_time() - cpu) / elapsed, delays
    finally:
        driver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    print("| hosts | CPU of the driver | command, median | worst |\n|---|---|---|---|")
    for count in arguments.hosts:
        with TemporaryDirectory() as folder:
            load, delays = measure(Path(folder), count, arguments.seconds)
        print(f"| {count} | {load:.1%} | {statistics.median(delays) * 1e3:.0f} ms | {max(delays) * 1e3:.0f} ms |")


if __name__ == "__main__":
    main()
