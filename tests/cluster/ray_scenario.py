"""Processes on a Ray cluster while its hosts come and go: `python -m tests.cluster.ray_scenario DIRECTORY ADDRESS N`.

Prints one line of JSON per observation; the test that starts it kills hosts and actors meanwhile, and adds the last one
of N hosts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from headrace.config.launch import RayConfig
from headrace.launch.driver import Driver
from headrace.launch.errors import BadRequest
from headrace.launch.hosts.base import ProcessSpec
from headrace.launch.hosts.ray import RayHosts
from headrace.transport.run_dir import RunDir

HOSTS = 2
TIMEOUT_S = 60.0
SERVICE = """
import json, os, sys, time
from headrace.launch.process import stop_with_launcher
stop_with_launcher()
print(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], "HEADRACE_DRIVER" in os.environ, os.getcwd()]), flush=True)
time.sleep(1000)
"""


def show(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not within {TIMEOUT_S:g} s")
        time.sleep(0.05)


def main() -> None:
    run, config = RunDir(Path(sys.argv[1])), RayConfig(address=sys.argv[2])
    run.root.mkdir()
    too_many = RayHosts(Driver(run), config, needed=9)
    try:
        too_many.wait_until_ready()
    except BadRequest as error:
        show(refused=error.value, fact=error.fact)
    too_many.close()
    waiting = RayHosts(
        Driver(run, notify=lambda sentence: show(notice=sentence)),
        config.model_copy(update={"autoscaling": True}),
        needed=int(sys.argv[3]),
    )
    show(complete=[host.name for host in waiting.wait_until_ready()])
    waiting.close()
    hosts = RayHosts(Driver(run), config, needed=HOSTS)
    listed = hosts.wait_until_ready()
    show(hosts=[[host.name, host.address, host.gpus, host.cores] for host in listed])

    def start(name: str, code: str, host: str, python: str = sys.executable) -> object:
        spec = ProcessSpec(name, [python, "-c", code], {"CUDA_VISIBLE_DEVICES": "1"}, host=host)
        return hosts.start(spec, run.logs / f"{name}.log")

    first, second = (host.name for host in listed)
    doomed = [start("doomed-0", SERVICE, first), start("doomed-1", SERVICE, second)]
    stopped, absent = start("stopped", SERVICE, first), start("absent", "", first, "/no/such/interpreter")
    failing = start("failing", "raise SystemExit(7)", second)
    for process in (*doomed, stopped):
        wait_for(process.last_lines, f"{process.name} to print")
    show(printed=doomed[0].last_lines(), port=hosts.free_port(first))
    stopped.terminate()
    for process in (stopped, absent, failing):
        process.wait(TIMEOUT_S)
    show(stopped=stopped.exit_status, absent=absent.exit_status, failing=failing.exit_status, memory=failing.peak_bytes)
    wait_for(lambda: doomed[0].pid, "the answer of an actor")
    show(ready="for the kill of an actor", pid=doomed[0].pid)
    doomed[0].wait(TIMEOUT_S)
    show(status=doomed[0].exit_status, host_is_lost=doomed[0].host_is_lost)
    show(ready="for the kill of a host")
    doomed[1].wait(TIMEOUT_S)
    show(status=doomed[1].exit_status, host_is_lost=doomed[1].host_is_lost, hosts=[host.name for host in hosts.list()])
    wait_for(lambda: len(hosts.list()) == HOSTS, "another host")
    show(replaced=[host.name for host in hosts.list()])
    wait_for(lambda: len(hosts.list()) > HOSTS, "a host that joins later")
    show(later=[host.name for host in hosts.list()])
    last = start("last", SERVICE, hosts.list()[-1].name)
    wait_for(last.last_lines, "last to print")
    hosts.close()
    show(closed=last.exit_status)


if __name__ == "__main__":
    main()
