"""A process of a run that does nothing but behave: `fake_process.py BEHAVIOUR NAME RUN_DIRECTORY`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headrace.launch import lifeline
from headrace.observe.metrics import MetricsLog
from headrace.observe.status import Status

behaviour, name, run = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def note(event: str) -> None:
    with open(run / "events", "a") as file:
        file.write(f"{name} {event} {os.getpid()}\n")


def end(*_: object) -> None:
    note("ended")
    sys.exit(0)


lifeline.watch(grace=1.0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else end)
status = Status(run / "status", name, interval=0.1)
note("started")
if behaviour == "parent":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(run / "events", "a") as file:
        file.write(f"grandchild started {child.pid}\n")
if behaviour == "never-up":
    time.sleep(60)
status.set("working")
if behaviour == "waits":
    status.begin_wait("batch 7", "the orchestrator")
if behaviour == "frozen":
    status.close("thinking")
if behaviour == "fails-but-stays":
    status.close("failed")
if behaviour in ("crash", "parent"):
    time.sleep(0.3)
    print("\n".join(f"line {index}" for index in range(40)))
    print("RuntimeError: the flux capacitor is missing", flush=True)
    os._exit(3)
if behaviour == "killed":
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "finishes":
    MetricsLog(run / "metrics.jsonl", name).log(1, {"loss": 0.5})
    time.sleep(0.3)
    end()
time.sleep(60)
