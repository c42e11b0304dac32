"""The share of a machine that each of several runs gets."""

from __future__ import annotations

from pathlib import Path

from headrace.config.base import ConfigError
from headrace.tools.evaluate.servers import Machine
from headrace.tools.sweep.jobs import Job, Share, check_engines, divide
from tests.config.run_files import run
from tests.refusals import refused

LARGE = 1 << 40


def test_without_gpus_every_run_has_two_cores_and_memory_to_itself():
    assert divide(Machine([], 16, LARGE), "auto", 1, 20) == [Share((), 1)] * 8
    assert divide(Machine([], 16, 7 << 30), "auto", 1, 20) == [Share((), 4)] * 2
    assert divide(Machine([], 16, LARGE), "auto", 1, 3) == [Share((), 2)] * 3
    assert divide(Machine([], 2, 0), "auto", 1, 3) == [Share((), None)]


def test_more_runs_at_once_can_be_requested():
    assert divide(Machine([], 2, 0), 4, 1, 9) == [Share((), 1)] * 4
    assert [share.gpus for share in divide(Machine(["0"], 16, LARGE), 2, 1, 9)] == [["0"], ["0"]]


def test_gpus_are_divided_into_sets():
    machine = Machine(["0", "1", "2", "3", "4"], 32, LARGE)
    assert [share.gpus for share in divide(machine, "auto", 1, 9)] == [["0"], ["1"], ["2"], ["3"], ["4"]]
    assert [share.gpus for share in divide(machine, "auto", 2, 9)] == [["0", "1"], ["2", "3"]]
    with refused(ConfigError, key="gpus_per_run", value=8):
        divide(machine, "auto", 8, 9)


def test_a_run_among_others_takes_its_threads_and_free_ports():
    plain = run()
    fixed = run(launch={"threads": 3}, inference={"port": 8000}, trainer={"weights": {"port": 9000}})
    among, alone = Share((), 2), Share((), None)
    assert among.overrides(plain) == {"launch.threads": 2}
    assert among.overrides(fixed) == {"inference.port": 0, "trainer.weights.port": 0}
    assert alone.overrides(fixed) == {}


def test_engines_of_others_serve_one_run_at_a_time():
    config = run(orchestrator={"client": {"base_url": ["http://host:8000/v1"]}})
    jobs = [Job("a", Path("a"), [], config)]
    check_engines(jobs, 1)
    with refused(ConfigError, key="orchestrator.client.base_url"):
        check_engines(jobs, 2)
