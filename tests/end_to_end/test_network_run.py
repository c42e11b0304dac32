"""A run whose orchestrator and trainer see the run directory through different mounts, like two hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from headrace.launch.driver import Driver
from headrace.observe.metrics import MetricsCollector, read_metrics
from headrace.tools.audit import audit_run
from headrace.transport.epochs import LAUNCHER_VAR
from headrace.transport.journal_files import HOSTS_VAR
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import REPOSITORY, finish, write_run_file
from tests.transport import nfs
from tests.transport.network_mount import CACHED_S, missing, mounted

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@contextmanager
def on_host(mount: Path, place: Path, *arguments: object, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """`headrace ARGUMENTS` in a mount namespace in which `place` is one of the mounts."""
    script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", mount, place, sys.executable, "-m", "headrace"]
    process = subprocess.Popen(
        [*map(str, command), *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, HOSTS_VAR: "2", LAUNCHER_VAR: "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("announces", "by_nfs"), [(False, False), (True, False), (True, True)])
def test_a_run_over_two_mounts_does_not_wait_for_their_caches(
    announces: bool, by_nfs: bool, tmp_path: Path, tiny_model: Path
):
    if by_nfs and (reason := nfs.missing()):
        pytest.skip(reason)
    here, there, place = tmp_path / "here", tmp_path / "there", tmp_path / "run"
    place.mkdir()
    file = write_run_file(tmp_path, tiny_model)
    file.write_text(file.read_text().replace("max_steps = 3", "max_steps = 8"))
    with ExitStack() as stack:
        source: Path | str = tmp_path / "folder"
        if by_nfs:
            source = stack.enter_context(nfs.exported(tmp_path / "folder", tmp_path / "server"))
        for mount in (here, there):
            stack.enter_context(mounted(source, mount))
        env: dict[str, str] = {}
        with on_host(here, place, "prepare", file, env={}) as process:
            code, output = finish(process)
            assert code == 0, output
        if announces:
            driver = stack.enter_context(closing(Driver(RunDir(tmp_path / "folder"), is_alone=True)))
            env.update(driver.env)
        stack.enter_context(on_host(here, place, "serve", place, env=env))
        orchestrator = stack.enter_context(on_host(here, place, "orchestrator", place, env=env))
        trainer = stack.enter_context(on_host(there, place, "trainer", place, env=env))
        for process in (trainer, orchestrator):
            code, output = finish(process, timeout=300)
            assert code == 0, output
        MetricsCollector(RunDir(tmp_path / "folder").metrics).close()
    run = RunDir(tmp_path / "folder")
    assert audit_run(run).problems == []
    records = [record for record in read_metrics(run.metrics) if "time/step" in record]
    steps = [record["time/step"] for record in records]
    waits = [record["time/wait_for_batch"] for record in records]
    print(f"announcements {announces}, NFS {by_nfs}: seconds per step {steps}, of it waiting for a batch {waits}")
    assert len(steps) == 8
    assert sum(steps[1:]) < CACHED_S  # a single wait for a cache takes longer
