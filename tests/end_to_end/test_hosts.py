"""A run on several hosts: node agents of this machine, each with real processes, of which one is killed."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import finish, headrace, start, wait_until, write_run_file
from tests.end_to_end.test_real_run import draws_trained_once, steps_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

NODES = ("--launch.on", "nodes", "--launch.trainer_nodes", 2, "--launch.inference_nodes", 1, "--launch.spare_nodes", 1)


def test_a_lost_trainer_host_is_replaced_by_a_spare_one_and_no_draw_is_lost(tmp_path: Path, tiny_model: Path):
    file, run = write_run_file(tmp_path, tiny_model), RunDir(tmp_path / "run")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = start("rl", file, "--max_steps", 12, "--launch.interface", "lo", *NODES, env=environment)
    agents: dict[str, subprocess.Popen[str]] = {}
    try:
        wait_until(lambda: run.driver.exists() or process.poll() is not None, "the driver")
        agents = {name: start("node", run.root, "--name", name, env=environment) for name in "abcd"}
        wait_until(lambda: run.metrics.exists() and len(steps_of(run, "trainer", "loss")) >= 4, "step 4", 240)
        starts = (run.logs / "orchestrator.log").read_text().count("training on letters")
        agents["b"].send_signal(signal.SIGKILL)  # its processes end with it
        code, output = finish(process, 400)
    finally:
        for agent in agents.values():
            agent.kill()
            agent.communicate()
        process.kill()
    assert code == 0, output
    places = re.findall(r"(\S+) on (\w)\b", output)
    assert places[:4] == [("inference", "c"), ("trainer", "a"), ("trainer-1", "b"), ("orchestrator", "d")]
    assert places[4:6] == [("trainer", "a"), ("trainer-1", "d")]
    assert re.search(r"step \d+ was trained \d+ s after the loss of host b was detected", output)
    assert (run.logs / "orchestrator.log").read_text().count("training on letters") == starts
    assert steps_of(run, "trainer", "loss")[-1] == 12
    assert draws_trained_once(run)
    code, output = headrace("audit", run.root)
    assert code == 0, output
