"""Findings about synthetic states of a run, and none about a healthy one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli.main import main
from headrace.launch.heartbeat import Heartbeat
from headrace.machine import KernelProcess, list_processes
from headrace.observe.diagnosis import (
    CLOCK_S,
    LONG_WAIT_S,
    LONG_WORK_S,
    SILENT_S,
    STALL_S,
    Finding,
    Notices,
    diagnose,
    signs_of_progress,
    works_long,
)
from headrace.observe.metrics import History
from headrace.observe.run_state import (
    TAIL_BYTES,
    HeartbeatContent,
    RunReader,
    RunState,
    last_lines,
    unreachable_servers,
)
from headrace.observe.status import ObservedStatus, Progress, Status, not_up
from headrace.transport.files import MARKER
from headrace.transport.run_dir import RunDir
from tests.observe.test_status import Clocks

NOW = 1000.0
HERE = "here"
LAUNCHER, TRAINER, ENGINE = 10, 13, 21
GIB = 1 << 30
RECORDED = Path(__file__).parents[1] / "data" / "recorded-runs"


def steps(count: int, seconds: float = 10.0, **values: float) -> History:
    """Recorded steps; `values` are of the orchestrator, with `__` for `/`."""
    own = {name.replace("__", "/"): value for name, value in values.items()}
    history = History()
    for step in range(1, count + 1):
        at = {"step": step, "time": 100.0 + seconds * step}
        history.add({**at, "process": "orchestrator", "progress/rollouts": step, "time/batch": seconds, **own})
        history.add({**at, "process": "trainer", "loss": 0.1, "time/step": seconds})
    return history


def status(name: str, pid: int, state: str, **fields: Any) -> ObservedStatus:
    return ObservedStatus(name, pid, NOW, state, host=HERE, **fields)


def healthy(history: History | None = None, **changes: Any) -> RunState:
    """A run in the middle of a step, all processes on this host; `changes` of its heartbeat."""
    statuses = [
        status("inference", 11, "serving", gauges={"running": 8, "waiting": 0, "saturated_s": 0.0, "kv_usage": 0.4}),
        status(
            "orchestrator", 12, "collecting batch 7", progress=Progress("rollouts", 3, 16, NOW - 2),
            gauges={"dispatcher/inflight_train": 16, "oldest_episode_env": "letters", "oldest_episode_s": 3.0},
        ),
        status("trainer", TRAINER, "waiting for batch 7", waiting_for="batch 7 from the orchestrator",
               waiting_since=NOW - 4),
    ]  # fmt: skip
    beat = HeartbeatContent(NOW, LAUNCHER, "running", 6, NOW - 5, host=HERE)
    processes = {pid: KernelProcess(LAUNCHER, "S", "python") for pid in (11, 12, TRAINER)}
    processes |= {LAUNCHER: KernelProcess(1, "S", "python"), ENGINE: KernelProcess(11, "R", "engine")}
    return RunState(
        steps(6) if history is None else history,
        {entry.process: entry for entry in statuses},
        msgspec.structs.replace(beat, **changes),
        host=HERE,
        processes=processes,
        free_bytes=100 * GIB,
        checkpoint_bytes=GIB,
    )


def change(run: RunState, process: str, **fields: Any) -> None:
    run.statuses = {**run.statuses, process: msgspec.structs.replace(run.statuses[process], **fields)}


def found(run: RunState) -> list[tuple[str, str, str]]:
    return [(finding.kind, finding.severity, finding.process) for finding in diagnose(run)]


def test_a_healthy_run_has_no_finding() -> None:
    assert diagnose(healthy()) == []


@pytest.mark.parametrize("name", ["rl", "sft", "hackable"])
def test_a_recorded_run_has_no_finding(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose(RunReader(RunDir(RECORDED / name)).read()) == []
    assert main(["doctor", str(RECORDED / name), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["findings"] == []


@pytest.mark.parametrize(
    ("pid", "process"), [(LAUNCHER, "launcher"), (11, "inference"), (ENGINE, "inference"), (TRAINER, "trainer")]
)
def test_a_stopped_process_is_named_at_once_and_what_waits_for_it_is_not(pid: int, process: str) -> None:
    run = healthy(last_progress=NOW - 500)
    run.processes = {**run.processes, pid: run.processes[pid]._replace(state="T")}
    change(run, "orchestrator", waiting_for="weights after step 5 from the trainer", waiting_since=NOW - 400)
    assert found(run) == [("stopped", "problem", process)]
    assert str(pid) in diagnose(run)[0].fix


def test_a_process_of_another_host_is_not_looked_up_among_those_of_this_one() -> None:
    run = healthy()
    run.processes = {**run.processes, TRAINER: run.processes[TRAINER]._replace(state="T")}
    change(run, "trainer", host="elsewhere")
    assert found(run) == []
    change(run, "trainer", silent_s=SILENT_S)
    assert found(run) == [("silent", "problem", "trainer")]


@pytest.mark.parametrize(("state", "hint"), [("S", "py-spy"), ("D", "file system"), ("Z", "has ended")])
def test_a_silent_process_is_explained_by_what_the_kernel_knows_of_it(state: str, hint: str) -> None:
    run = healthy()
    run.processes = {**run.processes, TRAINER: run.processes[TRAINER]._replace(state=state)}
    change(run, "trainer", silent_s=SILENT_S - 1)
    assert found(run) == []
    change(run, "trainer", silent_s=SILENT_S)
    assert found(run) == [("silent", "problem", "trainer")]
    assert hint in diagnose(run)[0].fix


def test_a_launcher_that_is_gone_explains_that_all_are_silent() -> None:
    run = healthy()
    run.silent_s = 3 * SILENT_S
    run.processes = {1: KernelProcess(0, "S", "init")}
    for process in run.statuses:
        change(run, process, silent_s=run.silent_s)
    assert found(run) == [("gone", "problem", "launcher")]


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_run_that_has_ended_in_order_has_no_silent_process(state: str) -> None:
    run = healthy(state=state)
    run.silent_s = 86_400.0
    for process in run.statuses:
        change(run, process, silent_s=86_400.0)
    assert found(run) == []


def test_a_failed_run_says_why_and_which_process_failed() -> None:
    run = healthy(state="failed", problem="inference exited with status 75 after 3 restarts without progress")
    change(run, "inference", state="failed", problem="the engine died: OutOfMemoryError: CUDA out of memory")
    assert found(run) == [("failed", "problem", "launcher"), ("out_of_memory", "problem", "inference")]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("inference exited with status 75 (the engine died: DefaultCPUAllocator: can't allocate memory)",
         ("out_of_memory", "problem", "inference")),
        ("inference was ended by SIGKILL; restart 1 of 3", ("failed", "warning", "inference")),
    ],
)  # fmt: skip
def test_a_process_that_was_restarted_without_progress_since_is_named(how: str, expected: tuple[str, ...]) -> None:
    assert found(healthy(restarts={"inference": how})) == [expected]


def test_an_error_about_memory_in_a_log_explains_a_failure_and_a_stall_but_not_an_older_one() -> None:
    error = "RuntimeError: DefaultCPUAllocator: can't allocate memory"
    run = healthy(restarts={"inference": "inference exited with status 75; restart 2 of 3"})
    run.memory_errors = {"inference": (error, 1.0)}
    assert found(run) == [("out_of_memory", "problem", "inference")]
    assert error in diagnose(run)[0].fact
    for still, log_age, expected in ((9, 5.0, []), (10, 12.0, ["out_of_memory"]), (20, 51.0, [])):
        run = healthy(last_progress=NOW - still)
        change(run, "orchestrator", progress=None)
        run.memory_errors = {"inference": (error, log_age)}
        assert [finding.kind for finding in diagnose(run)] == expected


@pytest.mark.parametrize(("free", "severity"), [(0, "problem"), (GIB - 1, "warning"), (GIB, None)])
def test_a_disk_is_full_before_the_next_checkpoint_fails(free: int, severity: str | None) -> None:
    run = healthy()
    run.free_bytes = free
    assert found(run) == ([("disk_full", severity, "disk")] if severity else [])


def test_a_disk_that_does_not_answer_is_named() -> None:
    run = healthy()
    change(run, "orchestrator", waiting_for="batch 6 from the disk", waiting_since=NOW - LONG_WAIT_S)
    assert found(run) == [("disk_slow", "problem", "orchestrator")]


def test_a_slow_disk_is_one_that_takes_much_of_a_step() -> None:
    assert found(healthy(steps(6, time__write_batch=0.9))) == []
    assert found(healthy(steps(6, time__write_batch=2.6))) == [("disk_slow", "warning", "disk")]
    assert found(healthy(steps(6, seconds=60.0, time__write_batch=2.6))) == []


def test_a_server_of_the_configuration_that_is_gone_is_named_by_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.create_server(("127.0.0.1", 0)) as dead:
        urls = [f"http://127.0.0.1:{server.getsockname()[1]}/v1" for server in (alive, dead)]
        dead.close()
        algorithms = [
            {"algo": {"teacher": {"name": name, "base_url": [url]}}} for name, url in zip("ab", urls, strict=True)
        ]
        run = healthy()
        run.unreachable = unreachable_servers({"orchestrator": {"train": {"env": algorithms}}})
    key = "orchestrator.train.env.1.algo.teacher"
    assert found(run) == [("unreachable", "problem", key)]
    assert urls[1] in diagnose(run)[0].fact


def test_a_clock_that_was_set_is_reported_for_an_hour() -> None:
    run = healthy()
    change(run, "trainer", clock_jump_s=-3600.0, clock_jump_since=NOW - 10)
    assert found(run) == [("clock", "warning", "trainer")]
    assert "-3,600 s" in diagnose(run)[0].fact
    change(run, "trainer", clock_jump_since=NOW - CLOCK_S)
    assert found(run) == []


@pytest.mark.parametrize(("age_s", "severity"), [(LONG_WAIT_S - 1, "warning"), (LONG_WAIT_S, "problem")])
def test_groups_without_signal_are_what_the_orchestrator_reports(age_s: float, severity: str) -> None:
    run = healthy(last_progress=NOW - 500)
    change(run, "orchestrator", problem="every reward was 0", problem_since=NOW - age_s)
    assert ("reported", severity, "orchestrator") in found(run)
    assert "every reward was 0" in diagnose(run)[0].fact


def test_few_rollouts_with_a_signal_are_a_warning() -> None:
    assert found(healthy(steps(6, effective_batch_size=0.2))) == []
    run = healthy(steps(6, effective_batch_size=0.05, solve_none=0.9))
    assert found(run) == [("no_signal", "warning", "orchestrator")]
    assert "90% by none" in diagnose(run)[0].fact
    assert found(healthy(steps(4, effective_batch_size=0.05))) == []  # too few steps


def test_an_environment_hangs_if_no_episode_has_a_request_for_longer_than_usual() -> None:
    run = healthy(last_sign=NOW - 31)
    hanging = {"oldest_episode_env": "letters", "oldest_episode_s": 31.0, "dispatcher/inflight_train": 16}
    change(run, "orchestrator", gauges=hanging, progress=Progress("rollouts", 3, 16, NOW - 31))
    assert found(run) == []  # an engine works
    change(run, "inference", gauges={"running": 0, "waiting": 0})
    assert found(run) == [("environment", "problem", "orchestrator")]
    assert "'letters'" in diagnose(run)[0].fact and "16 episodes" in diagnose(run)[0].fact
    change(run, "orchestrator", progress=Progress("rollouts", 3, 16, NOW - 5))
    assert found(run) == []  # other episodes arrive
    change(run, "orchestrator", progress=Progress("rollouts", 3, 16, NOW - 31))
    change(run, "trainer", waiting_for="")
    run.heartbeat = msgspec.structs.replace(run.heartbeat, last_sign=NOW - 5)
    assert found(run) == []  # the trainer has micro-batches left
    run.heartbeat = msgspec.structs.replace(run.heartbeat, last_sign=NOW - 31, longest_quiet_s=30.0)
    assert found(run) == []  # it often takes that long


def test_a_saturated_engine_names_what_limits_it() -> None:
    run = healthy()
    gauges = {"running": 8, "waiting": 40, "saturated_s": LONG_WAIT_S, "kv_usage": 0.4}
    change(run, "inference", gauges=gauges)
    assert found(run) == [("saturated", "warning", "inference")]
    assert "max_running" in diagnose(run)[0].fix
    change(run, "inference", gauges=gauges | {"kv_usage": 0.97})
    assert "kv_cache_gb" in diagnose(run)[0].fix


def test_a_trainer_is_behind_if_batches_mostly_wait_for_it_unless_they_share_a_device() -> None:
    run = healthy(steps(6, time__wait_for_weights=6.0))
    assert found(run) == [("trainer_behind", "warning", "trainer")]
    change(run, "inference", gauges={**run.statuses["inference"].gauges, "hand_overs": 6})
    assert found(run) == []


def test_a_gpu_that_is_not_returned_is_named_by_the_side_that_waits() -> None:
    run = healthy()
    change(run, "inference", waiting_for="the GPU from the trainer", waiting_since=NOW - 30)
    assert found(run) == []  # the trainer works
    run.heartbeat = msgspec.structs.replace(run.heartbeat, last_sign=NOW - 30)
    assert found(run) == [("gpu", "problem", "inference")]
    run.history = History()
    assert found(run) == []  # the first step may compile
    change(run, "trainer", waiting_for="the GPU from the engine", waiting_since=NOW - 30)
    assert found(run) == [("gpu", "problem", "trainer")]


@pytest.mark.parametrize(
    ("longest_quiet_s", "named_s", "surely_s"), [(0.0, STALL_S, STALL_S), (40.0, 50.0, 80.0), (100.0, 125.0, 200.0)]
)
def test_a_stall_is_judged_by_the_signs_of_progress_and_not_by_the_length_of_steps(
    longest_quiet_s: float, named_s: float, surely_s: float
) -> None:
    for age, expected in ((named_s - 1, None), (surely_s - 1, "warning"), (surely_s, "problem")):
        run = healthy(steps(6, seconds=500.0), last_sign=NOW - age, longest_quiet_s=longest_quiet_s)
        change(run, "orchestrator", progress=None, gauges={}, waiting_for="rollouts", waiting_since=NOW - age)
        severity = None if age < named_s else expected
        assert found(run) == ([("stalled", severity, "run")] if severity else [])


@pytest.mark.parametrize("quiet_s", [20, 46])
def test_a_stall_of_a_run_with_long_steps_is_named_within_a_minute_and_a_healthy_one_never(
    quiet_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch)
    heartbeat, history = Heartbeat(tmp_path / "heartbeat.json"), History()
    step_s, stalls_at = 140, 2 * 140 + 70
    for second in range(stalls_at + 61):
        step, within = divmod(min(second, stalls_at), step_s)
        if within == 0 and step:
            history.add({"step": step, "time": 1.0, "process": "trainer", "loss": 0.1, "time/step": float(step_s)})
        trainer = status("trainer", TRAINER, f"training step {step + 1}")
        trainer.progress = Progress("micro-batch", within // quiet_s, 999, clocks.wall)
        signs = signs_of_progress({"trainer": trainer})
        heartbeat.update(step, history.moves, "", {}, signs, works_long(trainer))
        findings = diagnose(RunState(history, {"trainer": trainer}, heartbeat.content))
        if second <= stalls_at:
            assert not any(finding.severity == "problem" for finding in findings)
            assert findings == [] or step == 0
        clocks.advance(1.0)
    assert [finding.kind for finding in findings] == ["stalled"]


def test_rollouts_that_never_end_are_a_stall_although_tokens_are_sampled() -> None:
    run = healthy(last_progress=NOW - 3 * 20, last_sign=NOW)
    change(run, "orchestrator", progress=Progress("rollouts", 3, 16, NOW - 3 * 20))
    assert found(run) == [("stalled", "problem", "run")]
    run.history = steps(6, seconds=21.0)
    assert found(run) == []


def test_a_checkpoint_may_take_minutes() -> None:
    for quiet_s, severity in ((STALL_S, "warning"), (LONG_WORK_S, "problem")):
        run = healthy(last_sign=NOW - quiet_s, last_progress=NOW - quiet_s)
        change(run, "orchestrator", progress=None, gauges={})
        change(run, "trainer", state="saving the checkpoint of step 6", waiting_for="")
        assert found(run) == [("stalled", severity, "run")]


def test_a_stall_says_what_each_process_does() -> None:
    run = healthy(last_progress=NOW - 63)
    change(run, "orchestrator", progress=None, gauges={})
    change(run, "trainer", waiting_since=NOW - 63)
    (finding,) = diagnose(run)
    assert "trainer: waiting for batch 7 from the orchestrator (63 s)" in finding.fact
    assert "no progress for 63 s" in finding.fact


def test_a_micro_batch_counts_as_progress() -> None:
    run = healthy(last_progress=NOW - 500, last_sign=NOW - 5)
    change(run, "trainer", waiting_for="", progress=Progress("micro-batch", 3, 7, NOW - 5))
    assert found(run) == []


def test_a_first_step_that_compiles_is_only_a_warning() -> None:
    run = healthy(History(), last_progress=NOW - 500)
    change(run, "orchestrator", progress=None, waiting_for="rollouts", waiting_since=NOW - 500)
    assert found(run) == [("stalled", "problem", "run")]
    run = healthy(History(), last_progress=NOW - LONG_WORK_S + 1)
    change(run, "orchestrator", progress=None, waiting_for="rollouts", waiting_since=NOW - LONG_WORK_S + 1)
    change(run, "trainer", state="compiling", waiting_for="")
    assert found(run) == [("stalled", "warning", "run")]


def test_a_finding_is_printed_at_growing_intervals_and_again_if_it_comes_back() -> None:
    notices, finding = Notices(), Finding("kind", "problem", "trainer", "fact")
    printed = [now for now in range(300) if notices.due([] if now == 200 else [finding], float(now))]
    assert printed == [0, 30, 60, 120, 201, 231, 261]


def test_an_empty_batch_is_printed_only_if_others_follow() -> None:
    notices, run = Notices(), healthy()
    for age, expected in ((0, 0), (29, 0), (30, 1), (59, 0), (60, 1)):
        change(run, "orchestrator", problem="every reward was 0", problem_since=NOW - age)
        assert len(notices.due(diagnose(run), float(age))) == expected


def test_a_process_is_up_once_it_does_something_else_than_starting() -> None:
    wait = {"waiting_for": "batch 3 from the orchestrator", "waiting_since": NOW - 5}
    statuses = {"inference": status("inference", 1, "serving"), "trainer": status("trainer", 2, "starting", **wait)}
    assert not_up(["inference", "trainer", "orchestrator"], statuses) == [
        "trainer (starting, waiting for batch 3 from the orchestrator (5 s))",
        "orchestrator (has not reported yet)",
    ]


# -- what is read ---------------------------------------------------------------------------------------------------


def test_a_stopped_process_is_found_among_those_of_this_host() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        listed = list_processes().get(process.pid)
        process.kill()
    if listed is None:
        pytest.skip("the kernel does not list processes")
    assert listed == KernelProcess(os.getpid(), "T", "sleep")


def test_the_age_of_a_status_is_known_at_the_first_look(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    Status(run.status, "trainer").close("training")
    path = run.status / "trainer.json"
    then = path.stat().st_mtime - 40
    os.utime(path, (then, then))
    assert RunReader(run).read().statuses["trainer"].silent_s == pytest.approx(40, abs=20)  # a loaded machine


@pytest.mark.parametrize(
    "error",
    [
        "12:00:00 ERROR the engine died: MemoryError:",
        "ImportError: libtorch_cpu.so: failed to map segment from shared object",
    ],
)
def test_errors_about_memory_are_found_at_the_end_of_a_log(tmp_path: Path, error: str) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    Status(run.status, "inference").close("failed")
    log = run.logs / "inference.log"
    log.write_text(f"{error} \n12:00:01 stopping\n")
    (line, _) = RunReader(run).read().memory_errors["inference"]
    assert line == error
    assert last_lines(log)[-1] == "12:00:01 stopping"
    log.write_text(log.read_text() + "12:10:00 serving\n" * 1000)
    assert RunReader(run).read().memory_errors == {}


def test_a_checkpoint_may_be_deleted_while_its_size_is_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    beat = HeartbeatContent(NOW, 1, "finished")
    run.heartbeat.write_bytes(msgspec.json.encode(beat))
    done = threading.Event()

    def replace() -> None:
        while not done.is_set():
            for step in (1, 2):
                checkpoint = run.checkpoints / f"step-{step:08d}"
                checkpoint.mkdir(parents=True)
                for name in (*map(str, range(20)), MARKER):
                    (checkpoint / name).write_bytes(b"content")
                shutil.rmtree(run.checkpoints / f"step-{3 - step:08d}", ignore_errors=True)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(100):
            assert diagnose(RunReader(run).read()) == []
    finally:
        done.set()
        thread.join()


def test_only_the_end_of_long_metrics_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir(tmp_path)
    record = {"process": "trainer", "time": 1.0, "loss": 0.1, "time/step": 1.0, **{f"m{n}": 0.0 for n in range(100)}}
    lines = [msgspec.json.encode({"step": step, **record}) + b"\n" for step in range(1, 1001)]
    run.metrics.write_bytes(b"".join(lines))
    reader = RunReader(run)
    history = reader.read().history
    assert history.step == 1000
    read = sum(map(len, lines[-len(history.trained) :]))
    assert TAIL_BYTES - len(lines[-1]) <= read <= TAIL_BYTES  # whole lines
    with run.metrics.open("ab") as file:
        file.write(msgspec.json.encode({**record, "step": 1001}) + b"\n")
    assert reader.read().history.step == 1001
    run.metrics.write_bytes(lines[0])  # as a resume from an earlier checkpoint does
    assert reader.read().history.step == 1
    assert not caplog.records


def test_the_exit_status_says_whether_there_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RECORDED / "sft", tmp_path / "run")
    beat = HeartbeatContent(NOW, 1, "failed", 4, NOW, "trainer exited with status 1")
    (tmp_path / "run" / "heartbeat.json").write_bytes(msgspec.json.encode(beat))
    assert main(["doctor", str(tmp_path / "run")]) == 1
    assert "trainer exited with status 1" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path)]) == 2
