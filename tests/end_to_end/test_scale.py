"""A run whose number of inference servers changes while it runs."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import SAVED
from headrace.observe.status import StatusReader
from headrace.transport.endpoint import read_endpoints
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import finish, headrace, is_alive, start, wait_until, write_run_file
from tests.end_to_end.test_real_run import draws_trained_once, steps_of

pytestmark = [pytest.mark.timeout(400), pytest.mark.full]


def test_servers_are_added_used_lost_and_drained_and_no_draw_is_lost(tmp_path: Path, tiny_model: Path):
    file, run = write_run_file(tmp_path, tiny_model), RunDir(tmp_path / "run")
    process = start("rl", file, "--max_steps", 100_000, "--orchestrator.eval.interval", 100_000)

    def wait(condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            assert process.poll() is None, finish(process)[1]
            return condition()

        wait_until(holds, what, 150)

    def trained() -> int:
        return len(steps_of(run, "trainer", "loss")) if run.metrics.exists() else 0

    def sampled(name: str) -> int:
        status = StatusReader(run.status).read().get(name)
        return 0 if status is None else status.gauges.get("tokens_sampled", 0)

    wait(lambda: trained() >= 2, "step 2")
    code, output = headrace("scale", run.root, "--inference", 3)
    assert code == 0, output
    names = ("inference", "inference-1", "inference-2")
    wait(lambda: len(read_endpoints(run.endpoints)) == 3, "three servers")
    before = {name: sampled(name) for name in names}
    wait(lambda: all(sampled(name) > before[name] + 100 for name in names), "samples of all servers")

    lost = StatusReader(run.status).read()["inference-2"].pid
    os.kill(lost, signal.SIGKILL)
    wait(lambda: len(read_endpoints(run.endpoints)) == 3 and sampled("inference-2") > 100, "the lost server is back")

    pids = [StatusReader(run.status).read()[name].pid for name in names]
    code, output = headrace("scale", run.root, "--inference", 1)
    assert code == 0, output
    wait(lambda: [is_alive(pid) for pid in pids] == [True, False, False], "one server")
    steps = trained()
    wait(lambda: trained() > steps + 2, "steps with one server")
    process.send_signal(signal.SIGUSR1)
    code, output = finish(process)
    assert code == SAVED, output
    assert output.count("restarting it") == 1  # the one that was killed
    options = ("--max_steps", run.latest_checkpoint_step() + 5, "--orchestrator.eval.interval", 100_000)
    code, output = headrace("rl", file, *options, "--resume")
    assert code == 0, output
    assert draws_trained_once(run)
    code, output = headrace("audit", run.root)
    assert code == 0, output
