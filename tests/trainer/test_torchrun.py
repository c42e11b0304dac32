"""What several ranks end with, as one process."""

import os
import socket
import subprocess
import sys
import time

import pytest

from headrace.launch.process import PARENT_VAR, TORCHRUN_VAR
from headrace.trainer.ranks import INTERFACE_VARIABLES, RankExit, choose_network_interface, joint_exit_code

KILLED, TERMINATED, STOPPED = -9, -15, 143


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        ([(KILLED, 100), (1, 100)], KILLED),  # the other failed in talking to it
        ([(1, 100), (KILLED, 101)], KILLED),  # whichever is noticed first
        ([(-11, 100)], -11),
        ([(2, 100), (TERMINATED, 100)], 2),  # explained; torch ended the others
        ([(1, 100), (2, 100), (STOPPED, 101)], 2),
        ([(2, 100), (KILLED, 131)], 2),  # torch itself lost patience with it
        ([(STOPPED, 100), (STOPPED, 100)], STOPPED),
        ([(TERMINATED, 100), (TERMINATED, 100)], STOPPED),
    ],
)
def test_the_cause_of_several_endings_is_the_ending_of_all(endings: list[tuple[int, int]], expected: int):
    assert joint_exit_code([RankExit(*ending) for ending in endings]) == expected


@pytest.mark.skipif("lo" not in {name for _, name in socket.if_nameindex()}, reason="the loopback is not `lo`")
def test_collectives_use_the_interface_of_the_route_unless_one_is_configured(monkeypatch: pytest.MonkeyPatch):
    gloo, nccl = INTERFACE_VARIABLES
    monkeypatch.setenv(gloo, "")  # restored after the test
    monkeypatch.delenv(gloo)
    monkeypatch.setenv(nccl, "ib7")
    choose_network_interface("127.0.0.1:29500")
    assert (os.environ[gloo], os.environ[nccl]) == ("lo", "ib7")


def test_a_rank_whose_parent_was_gone_before_it_looked_ends_at_once():
    program = "from headrace.launch.process import stop_with_launcher as stop; import time; stop(); time.sleep(60)"
    environment = {**os.environ, TORCHRUN_VAR: "x", PARENT_VAR: "1"}  # the child of another process now
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert done.returncode == KILLED
    assert time.monotonic() - started < 60
