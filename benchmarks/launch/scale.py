"""What `headrace scale` does to the throughput of a run: rollouts per second with 1, 3 and again 1 server.

    python -m benchmarks.launch.scale [--servers 1 3 1] [--seconds 60] [--cores 0.25]

A real run over node agents on this machine: one host trains, the others sample, each with one server of the tiny model.
A control group limits each sampling host to `--cores`, so that servers do not take each other's time; that needs root
and Linux. They decode two requests at a time, so that the trainer waits for them. The columns: servers, seconds from
the command until that number of servers has an address, optimizer steps and rollouts per second of the `--seconds`
after that, tokens per second of each server meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.observe.metrics import read_metrics
from headrace.observe.status import StatusReader
from headrace.transport.endpoint import read_endpoints
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import write_run_file

HEADRACE = [sys.executable, "-m", "headrace"]
CONTROL_GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
BATCH_SIZE = 16
LIMIT_S = 600.0
OPTIONS = {
    "launch.on": "nodes",
    "launch.trainer_nodes": 1,
    "launch.inference_nodes": 1,
    "launch.threads": 1,
    "max_steps": 1_000_000,
    "seq_len": 160,
    "trainer.optim.lr": 1e-6,
    "trainer.ckpt.interval": 1000,
    "inference.max_running": 2,
    "orchestrator.batch_size": BATCH_SIZE,
    "orchestrator.train.sampling.max_tokens": 64,
    "orchestrator.eval.interval": 1_000_000,
}


@contextmanager
def control_group(name: str, cores: float) -> Iterator[list[str]]:
    """Yield the beginning of a command line that limits the command, and what it starts, to a part of a core."""
    is_unified = (CONTROL_GROUPS / "cgroup.controllers").exists()
    group = (CONTROL_GROUPS if is_unified else CONTROL_GROUPS / "cpu") / f"headrace-{os.getpid()}-{name}"
    group.mkdir()
    quota_us = round(cores * PERIOD_US)
    if is_unified:
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    else:
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        group.rmdir()


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 3, 1])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cores", type=float, default=0.25)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        root, run = Path(folder), RunDir(Path(folder) / "run")
        subprocess.run([*HEADRACE, "init-model", "tiny", str(root / "model")], check=True, stdout=subprocess.DEVNULL)
        spare = {"launch.spare_nodes": max(arguments.servers) - 1}
        options = [word for key, value in {**OPTIONS, **spare}.items() for word in (f"--{key}", str(value))]
        hosts = [f"sampling-{number}" for number in range(max(arguments.servers))]
        groups = [stack.enter_context(control_group(host, arguments.cores)) for host in hosts]
        file = write_run_file(root, root / "model")
        launcher = stack.enter_context(running([*HEADRACE, "rl", str(file), *options], root / "log"))
        node = [*HEADRACE, "node", str(run.root), "--wait", str(LIMIT_S)]
        stack.enter_context(running([*node, "--name", "training", "--role", "trainer"], root / "training"))
        for host, limited in zip(hosts, groups, strict=True):
            stack.enter_context(running([*limited, *node, "--name", host], root / host))
        try:
            measure(run, launcher, arguments.servers, arguments.seconds)
        except AssertionError:
            print((root / "log").read_text()[-4000:])
            raise


def measure(run: RunDir, launcher: subprocess.Popen[bytes], phases: Sequence[int], seconds: float) -> None:
    def wait_for(condition: Callable[[], bool], what: str) -> float:
        began = time.monotonic()
        while not condition():
            assert launcher.poll() is None, "the run has ended"
            assert time.monotonic() - began < LIMIT_S, f"{what}: not within {LIMIT_S:g} s"
            time.sleep(0.1)
        return time.monotonic() - began

    wait_for(lambda: steps(run) >= 2, "two steps")
    print(f"{'servers':>7}{'after s':>9}{'steps':>7}{'rollouts/s':>12}  tokens/s of each server", flush=True)
    for servers in phases:
        subprocess.run(
            [*HEADRACE, "scale", str(run.root), "--inference", str(servers)], check=True, capture_output=True
        )
        taken = wait_for(lambda servers=servers: len(read_endpoints(run.endpoints)) == servers, f"{servers} servers")
        time.sleep(seconds / 4)  # until all of them have requests, or have none
        before, sampled, began = steps(run), tokens(run), time.monotonic()
        time.sleep(seconds)
        trained, elapsed = steps(run) - before, time.monotonic() - began
        rates = [f"{(count - sampled.get(name, 0)) / elapsed:.0f}" for name, count in tokens(run).items()]
        rate = trained * BATCH_SIZE / elapsed
        print(f"{servers:>7}{taken:>9.1f}{trained:>7}{rate:>12.2f}  {' '.join(rates)}", flush=True)


def steps(run: RunDir) -> int:
    """Return the last step that was trained."""
    files = [path for path in (run.metrics, run.root / "metrics" / "trainer.jsonl") if path.exists()]
    return max((record["step"] for path in files for record in read_metrics(path) if "loss" in record), default=0)


def tokens(run: RunDir) -> dict[str, int]:
    """Return the tokens that each server has sampled so far."""
    statuses = StatusReader(run.status).read()
    return {
        name: int(s.gauges.get("tokens_sampled", 0)) for name, s in statuses.items() if name.startswith("inference")
    }


if __name__ == "__main__":
    main()
