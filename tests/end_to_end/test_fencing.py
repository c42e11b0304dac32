"""A process that is paused at the worst moment, replaced, and continues, changes nothing of what is trained."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headrace.errors import FENCED
from headrace.tools.audit import audit_run
from headrace.transport.epochs import EPOCHS, LAUNCHER_VAR, list_epochs
from headrace.transport.journal import Journal
from headrace.transport.journal_files import journals
from headrace.transport.run_dir import RunDir
from tests.end_to_end.chaos import Evidence
from tests.end_to_end.runs import finish, headrace, start, wait_until, write_run_file
from tests.end_to_end.test_chaos import the_model_is_that_of_an_uninterrupted_trainer

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@contextmanager
def process(*arguments: object, paused_at: str = "") -> Iterator[subprocess.Popen[str]]:
    path = [str(Path(__file__).parent / "paused_renames"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PAUSED_RENAME": paused_at}
    if not paused_at:
        env[LAUNCHER_VAR] = "1"  # as a launcher starts it: it takes over at once
    started = start(*arguments, env=env)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def is_stopped(process: subprocess.Popen[str]) -> bool:
    assert process.poll() is None, process.communicate()[0]
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def prepare(directory: Path, model: Path) -> RunDir:
    code, output = headrace("prepare", write_run_file(directory, model))
    assert code == 0, output
    return RunDir(directory / "run")


def check_finished(run: RunDir, evidence: Evidence) -> None:
    batches = evidence.batches()  # one content of each step
    assert list(batches) == [1, 2, 3]
    assert audit_run(run).problems == []
    journal = Journal(run.journal, read_only=True)
    given = [(draw, step) for step, batch in batches.items() for draw in batch.draw_ids]
    assert len({draw for draw, _ in given}) == len(given)
    assert set(given) == {(draw.id, step) for draw, state, step, _ in journal.draws() if state == "trained"}
    the_model_is_that_of_an_uninterrupted_trainer(run, batches)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("batches..step-00000002.prepared.tmp", id="before its batch is prepared"),
        pytest.param("batches/.step-00000002.prepared", id="between commit and announcement"),
        pytest.param("rollouts.step-00000002.parquet.tmp", id="before its rollouts are written"),
    ],
)
def test_a_stopped_and_revived_orchestrator_is_fenced_off(moment: str, tmp_path: Path, tiny_model: Path):
    run = prepare(tmp_path, tiny_model)
    with ExitStack() as stack, Evidence(run, tmp_path / "evidence") as evidence:
        stack.enter_context(process("serve", run.root))
        trainer = stack.enter_context(process("trainer", run.root))
        first = stack.enter_context(process("orchestrator", run.root, paused_at=moment))
        wait_until(lambda: is_stopped(first), "the pause")
        second = stack.enter_context(process("orchestrator", run.root))
        wait_until(lambda: 2 in journals(run.root), "the takeover")
        os.kill(first.pid, signal.SIGCONT)
        code, output = finish(first, timeout=60)
        assert code == FENCED and "taken over" in output, output
        code, output = finish(second)
        assert code == 0, output
        code, output = finish(trainer)
        assert code == 0, output
    assert list_epochs(run.root / EPOCHS / "orchestrator") == [1, 2] or set(journals(run.root)) == {1, 2}
    check_finished(run, evidence)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("checkpoints.step-00000002.tmp", id="before its checkpoint appears"),
        pytest.param("weights.v-0-2.tmp", id="before a version is published"),
    ],
)
def test_a_stopped_and_revived_trainer_is_fenced_off(moment: str, tmp_path: Path, tiny_model: Path):
    run = prepare(tmp_path, tiny_model)
    with ExitStack() as stack, Evidence(run, tmp_path / "evidence") as evidence:
        stack.enter_context(process("serve", run.root))
        orchestrator = stack.enter_context(process("orchestrator", run.root))
        first = stack.enter_context(process("trainer", run.root, paused_at=moment))
        wait_until(lambda: is_stopped(first), "the pause")
        published = set(run.weights.published())
        second = stack.enter_context(process("trainer", run.root, "--resume"))
        wait_until(lambda: 2 in list_epochs(run.root / EPOCHS / "trainer"), "the takeover")
        wait_until(lambda: len(list((run.root / ".drafts").glob("trainer-*"))) == 1, "the end of the old drafts")
        os.kill(first.pid, signal.SIGCONT)
        code, output = finish(first, timeout=60)
        assert code == FENCED and "taken over" in output, output
        code, output = finish(second)
        assert code == 0, output
        assert {version for version in run.weights.published() if not version.incarnation} <= published
        code, output = finish(orchestrator)
        assert code == 0, output
    check_finished(run, evidence)
