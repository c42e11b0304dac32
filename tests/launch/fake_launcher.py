"""The supervisor over fake processes: `fake_launcher.py RUN_DIRECTORY NAME=BEHAVIOUR ... [option=number ...]`."""

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from headrace.cli.main import explain
from headrace.launch.errors import LaunchError
from headrace.launch.hosts.base import Host, ProcessSpec
from headrace.launch.hosts.local import LocalHosts
from headrace.launch.run_directory import hold
from headrace.launch.supervisor import Supervisor
from headrace.machine import HostMemory
from headrace.observe.terminal import make_view
from headrace.transport.run_dir import RunDir


class FixedPlan:
    """Processes that do not move."""

    left_out = ()

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        self._specs = specs

    def specs(self) -> Sequence[ProcessSpec]:
        return self._specs

    def move(self, hosts: Sequence[Host]) -> Sequence[ProcessSpec]:
        raise AssertionError("no host is lost")

    def scale(self, hosts: Sequence[Host], servers: int, may_wait: bool) -> Sequence[ProcessSpec]:
        raise AssertionError("the number of servers is fixed")


run = RunDir(Path(sys.argv[1]))
limits: dict[str, Any] = {
    "start_timeout": 120.0,
    "stop_timeout": 60.0,
    "stall_s": 60.0,
    "max_restarts": 3,
    "restart_delay_s": 0.1,
    "save_on_sigterm": False,
}
specs = []
for argument in sys.argv[2:]:
    key, value = argument.split("=")
    if key == "memory":  # a directory with the kernel's files
        limits[key] = HostMemory(Path(value))
        continue
    if key in limits:
        limits[key] = type(limits[key])(value)
        continue
    argv = [sys.executable, str(Path(__file__).with_name("fake_process.py")), value, key, str(run.root)]
    again = [*argv, "--resume"]
    specs.append(ProcessSpec(key, argv, {"PYTHONUNBUFFERED": "1"}, service=key == "inference", restart_argv=again))
try:
    with hold(run.root) as held, closing(LocalHosts((held,))) as hosts:
        sys.exit(Supervisor(FixedPlan(specs), hosts, run, make_view("fake", 5), **limits).run())
except LaunchError as error:
    explanation = explain(error)
    assert explanation is not None
    print(f"headrace: {explanation.message}", file=sys.stderr)
    sys.exit(explanation.exit_code)
