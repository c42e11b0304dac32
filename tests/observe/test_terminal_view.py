"""What is shown of a run, on a terminal and in a pipe."""

from __future__ import annotations

import io
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from headrace.observe import terminal
from headrace.observe.diagnosis import Finding, diagnose
from headrace.observe.metrics import History
from headrace.observe.run_state import RunState
from headrace.observe.status import ObservedStatus, Progress, activity
from headrace.observe.terminal import (
    LABEL_WIDTH,
    LiveView,
    PlainView,
    facts,
    make_view,
    number,
    render,
    sparkline,
)
from tests.observe.test_status import Clocks


def history(steps: int) -> History:
    records = []
    for step in range(1, steps + 1):
        at = {"step": step, "time": 100.0 + 2 * step}
        rewards = {"reward/all/mean": step / 10, "progress/rollouts": step, "off_policy/staleness/mean": 0.5}
        records.append({**at, "process": "orchestrator", **rewards, "perf/sampled_tokens_per_second": 4321.0})
        records.append({**at, "process": "trainer", "loss": 0.25, "perf/trained_tokens_per_second": 98765.0})
    return History(records)


def text_of(view: PlainView, console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.fixture
def pipe() -> Console:
    return Console(file=io.StringIO(), width=60)


def test_a_pipe_gets_plain_lines_and_a_terminal_the_live_view(pipe: Console) -> None:
    assert isinstance(make_view("run", 5, pipe), PlainView)
    view = make_view("run", 5, Console(file=io.StringIO(), force_terminal=True))
    assert isinstance(view, LiveView)
    view.close(History(), {})


def test_the_live_view_shows_progress_reward_speed_and_who_waits_for_whom() -> None:
    seen = history(10)
    seen.add({"step": 0, "time": 100.0, "process": "orchestrator", "eval/a/avg@1": 0.1})
    seen.add({"step": 10, "time": 120.0, "process": "orchestrator", "eval/a/avg@1": 0.9})
    statuses = {
        "inference": ObservedStatus("inference", 1, 130.0, "serving", gauges={"engine/running": 12}),
        "trainer": ObservedStatus("trainer", 2, 130.0, "idle", "batch 11 from the orchestrator", 127.0),
    }
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(render("my-run", 50, seen, statuses, 30.0, 110))
    shown = console.export_text()
    assert "step 10/50" in shown
    assert "30 s elapsed, 1:20 left" in shown  # forty steps of two seconds
    assert "1.000  ▁▁▂▃▄▅▆▇██" in shown
    assert "0.900" in shown
    assert "0.100 at first" in shown
    assert "4,321 sampled   98.8k trained" in shown
    assert "0.50 steps" in shown
    assert "serving  running 12" in shown
    assert "idle, waiting for batch 11 from the orchestrator (3 s)" in shown


def test_plain_lines_come_once_per_step_and_eval_and_are_never_wrapped(
    pipe: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PLAIN_INTERVAL_S", 0.0)
    view = PlainView(50, pipe)
    seen = History(history(3).steps.values())  # batches are ahead of the trainer
    view.show(seen, {})
    for record in history(3).trained.values():
        seen.add(record)
        view.show(seen, {})
        view.show(seen, {})
    seen.add({"step": 3, "time": 1.0, "process": "orchestrator", "eval/a/avg@1": 0.5})
    view.show(seen, {})
    view.close(seen, {})
    speeds = "sampled 4,321 tokens/s  trained 98,765 tokens/s  staleness 0.50"
    assert text_of(view, pipe) == [
        f"step 1/50  reward 0.100  loss 0.2500  {speeds}",
        f"step 2/50  reward 0.200  loss 0.2500  {speeds}",
        f"step 3/50  reward 0.300  loss 0.2500  {speeds}  1:34 left",
        "eval at step 3: a 0.500",
    ]


def test_failures_of_an_evaluation_are_shown_beside_its_score(pipe: Console) -> None:
    view, seen = PlainView(50, pipe), history(1)
    view.show(seen, {})
    seen.add({"step": 1, "time": 1.0, "process": "orchestrator", "eval/a/avg@1": 0.25, "eval/a/errors": 0.5})
    view.close(seen, {})
    assert text_of(view, pipe) == ["eval at step 1: a 0.250 (50% of its episodes failed)"]


def test_steps_that_change_nothing_are_reported() -> None:
    seen = History([{"step": 1, "time": 1.0, "process": "trainer", "loss": None, "optim/skipped": 1}])
    assert facts(seen) == ["loss nan", "1 update skipped: gradients not finite"]


def test_steps_before_a_resume_are_not_shown_again(pipe: Console) -> None:
    seen = history(10)
    seen.add({"step": 5, "time": 1.0, "process": "orchestrator", "eval/a/avg@1": 0.5})
    view = PlainView(50, pipe)
    view.show(seen, {})
    view.close(seen, {})
    assert text_of(view, pipe) == []


def test_fast_steps_are_thinned_and_the_last_is_always_shown(pipe: Console) -> None:
    view = PlainView(10, pipe)
    seen = History()
    view.show(seen, {})
    for record in history(10).trained.values():
        seen.add(record)
        view.show(seen, {})
    view.close(seen, {})
    lines = text_of(view, pipe)
    assert [line.split("  ")[0] for line in lines] == ["step 1/10", "step 10/10"]


def test_sparklines_span_their_own_range_and_a_fixed_width() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), width=30)) == 30


def test_numbers_are_short() -> None:
    assert [number(n) for n in (7, 0.914, 123.4, 4321.0, 98765.0, 1.25e6, 2e9, "x")] == [
        "7", "0.91", "123", "4,321", "98.8k", "1.2M", "2.0G", "x",
    ]  # fmt: skip


def test_a_run_without_any_record_shows_its_name_and_step_0() -> None:
    screen = io.StringIO()
    Console(file=screen, width=80).print(render("empty", 5, History(), {}, 0.0, 80))
    assert "empty" in screen.getvalue() and "0/5" in screen.getvalue()


ADVICE = (
    "512 batches in a row had nothing to train on: every reward was 0: too hard, too easy, or a reward that does not "
    "tell answers apart. Set orchestrator.max_empty_batches to end such a run"
)


def lines_at(width: int, title: str = "my-run", problem: str = "") -> list[str]:
    """The view of a run in its eleventh step, as a terminal of that width gets it."""
    seen = history(10)
    seen.add({"step": 10, "time": 120.0, "process": "orchestrator", "eval/a/avg@1": 0.9})
    wait = "rollouts from the environments and the inference server"
    gauges = {"dispatcher/inflight_train": 128, "dispatcher/inflight_eval": 0, "dispatcher/max_inflight": 256}
    collected = Progress("rollouts", 87, 128, 129.0)
    statuses = {
        "orchestrator": ObservedStatus(
            "orchestrator", 1, 130.0, "collecting batch 11", wait, 127.0, collected, problem, 70.0, gauges
        ),
        "trainer": ObservedStatus(
            "trainer", 2, 130.0, "training step 11", progress=Progress("micro-batch", 3, 7, 100.0)
        ),
    }
    console = Console(file=io.StringIO(), width=width, legacy_windows=False)
    findings = diagnose(RunState(seen, statuses))
    console.print(render(title, 50, seen, statuses, 30.0, width, findings))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("title", ["my-run", "a-run-with-a-name-that-is-longer-than-a-narrow-terminal-is-wide"])
@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int, title: str) -> None:
    lines = lines_at(width, title, ADVICE)
    assert max(map(cell_len, lines)) <= width
    assert title in "".join(line.strip() for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_sentences_are_wrapped_and_never_cut(width: int) -> None:
    lines = lines_at(width, problem=ADVICE)
    assert ADVICE in " ".join(" ".join(lines).split())
    values = " ".join(" ".join(line[LABEL_WIDTH:] for line in lines).split())
    waiting = "waiting for rollouts from the environments and the inference server (3 s)"
    assert f"collecting batch 11: rollouts 87 of 128, {waiting}" in values


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_gauges_are_left_out_where_they_would_take_most_of_the_lines(width: int) -> None:
    shown = " ".join(" ".join(lines_at(width)).split())
    assert ("inflight train 128" in shown) == (width >= 80)


def test_how_far_a_step_has_come_is_shown_and_since_when() -> None:
    shown = "\n".join(lines_at(110))
    assert "training step 11: micro-batch 3 of 7 (30 s)" in shown
    assert "collecting batch 11: rollouts 87 of 128, waiting for rollouts" in shown


def test_a_process_that_has_finished_is_not_expected_to_report() -> None:
    assert activity(ObservedStatus("trainer", 1, 100.0, "finished", silent_s=30.0)) == "finished"
    assert activity(ObservedStatus("trainer", 1, 100.0, "idle", silent_s=30.0)) == "idle (no heartbeat for 30 s)"


def test_a_run_that_retries_says_since_when_and_why_and_has_no_countdown() -> None:
    assert any(line.rstrip().endswith("1:20 left") for line in lines_at(250))
    lines = lines_at(250, problem=ADVICE)
    assert not any("left" in line for line in lines)
    since = time.strftime("%H:%M:%S", time.localtime(70.0))
    expected = f"orchestrator: no progress since {since} (1:00): {ADVICE}."
    assert any(line.split() == expected.split() for line in lines)


def test_plain_output_has_a_line_about_a_finding_and_more_at_growing_intervals(
    pipe: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, clocks = PlainView(50, pipe), Clocks(monkeypatch)
    for second in range(200):
        view.show(History(), {}, [Finding("stalled", "problem", "run", f"no progress for {second} s")])
        clocks.advance(1.0)
    assert text_of(view, pipe) == [f"run: no progress for {second} s." for second in (0, 30, 60, 120)]
