"""A process of a run that does nothing but behave: `fake_process.py BEHAVIOUR NAME RUN_DIRECTORY [--resume]`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headrace.errors import AGAIN, RESTART_RUN, SAVED
from headrace.launch.process import stop_with_launcher
from headrace.observe.metrics import MetricsLog
from headrace.observe.status import Status
from headrace.transport.endpoint import Endpoint, write_endpoint

behaviour, name, run = sys.argv[1], sys.argv[2], Path(sys.argv[3])
resumed = "--resume" in sys.argv
endpoint = run / "endpoints" / "inference.json"


def note(event: str) -> None:
    with open(run / "events", "a") as file:
        file.write(f"{name} {event} {os.getpid()}\n")


def end(*_: object) -> None:
    note("ended")
    sys.exit(0)


def starts() -> int:
    """How many processes of this name there have been, this one included."""
    return (run / "events").read_text().count(f"{name} started")


def train(step: int) -> None:
    MetricsLog(run / "metrics.jsonl", name).log(step, {"loss": 0.5})


def die() -> None:
    print(f"start {starts()} ends here", flush=True)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def save(*_: object) -> None:
    note("saved")
    sys.exit(SAVED)


stop_with_launcher(grace_s=1.0 if behaviour == "stubborn" else 60.0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else end)
signal.signal(signal.SIGUSR1, save)
note("finds-traces" if endpoint.exists() or (run / "status" / f"{name}.json").exists() else "finds-nothing")
status = Status(run / "status", name, interval=0.1)
note("started")
if resumed:
    note("resumed")
if behaviour == "parent" or (behaviour == "killed-then-works" and name == "trainer" and not resumed):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(run / "events", "a") as file:
        file.write(f"grandchild started {child.pid}\n")
if behaviour == "never-up" or (behaviour == "killed-then-never-up" and resumed):
    time.sleep(600)
status.set("working")
if behaviour == "waits":
    status.begin_wait("batch 7 from the orchestrator")
if behaviour == "finishes":
    status.notify(f"{name} has something to say")
if behaviour == "clock-is-set":
    wall_clock, days = time.time, int(run.joinpath("days").read_text())
    time.time = lambda: wall_clock() + 86400 * days
    time.sleep(0.5)  # some heartbeats
if behaviour == "frozen":
    status.close("thinking")
if behaviour in ("fails-but-stays", "fails-and-is-killed"):
    status.close("failed")
if behaviour in ("crash", "parent"):
    time.sleep(0.3)
    print("\n".join(f"line {index}" for index in range(40)))
    print("RuntimeError: the flux capacitor is missing", flush=True)
    os._exit(3)
if behaviour == "engine-dies" or (behaviour == "engine-dies-then-works" and not resumed):
    status.close("failed")  # as a process that leaves by an exception does
    print("the engine died: out of memory", flush=True)
    os._exit(AGAIN)
if behaviour == "sets-aside":
    status.close("failed")
    os._exit(RESTART_RUN)
if behaviour == "terminated":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
if behaviour in ("killed", "fails-and-is-killed") or (behaviour.startswith("killed-then") and not resumed):
    if name == "inference":
        write_endpoint(endpoint, Endpoint("http://127.0.0.1:1", os.getpid()))
    die()
if behaviour == "out-of-memory":
    status.set(f"saving the checkpoint of step {starts()}")
    memory = b"1" * (200 << 20)  # written to, so that it is resident
    counter = run / "machine" / "sys/fs/cgroup/memory.events"  # where the test has put the kernel's files
    counter.write_text(f"oom_kill {starts()}\n")
    die()
if behaviour == "killed-after-a-new-step":
    train(starts())
    if starts() <= 2:
        die()
if behaviour == "killed-after-the-same-step":
    train(1)
    die()
if behaviour in ("finishes", "clock-is-set", "killed-then-finishes", "killed-after-a-new-step"):
    train(starts())
    time.sleep(0.3)
    end()
time.sleep(600)
