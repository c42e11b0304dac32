"""The report of a sweep, from run directories: its numbers, its pictures, and what it says of what is missing."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from headrace.tools.compare.significance import welch
from headrace.tools.sweep.record import write_record
from headrace.tools.sweep.report import write_report
from tests.tools.evaluate.test_charts import check_legible
from tests.tools.sweep.sweeps import grid, record_of, results_of, write_evaluation, write_sweep

ENDS = {(0.1, 0): 0.2, (0.1, 1): 0.4, (0.2, 0): 0.8, (0.2, 1): 0.9}


def rows(directory: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((directory / "results.csv").read_text().splitlines()))


def test_variants_are_held_against_the_first_over_their_seeds(tmp_path: Path):
    report = write_report(tmp_path, write_sweep(tmp_path, ENDS), [])
    expected = welch([0.2, 0.4], [0.8, 0.9])
    assert expected is not None
    comparison: Any = results_of(tmp_path)["comparison"]
    found = comparison["differences"][0]
    assert (found["baseline"], found["variant"], found["method"]) == ("lr=0.1", "lr=0.2", "welch")
    assert (found["difference"], found["p"]) == pytest.approx((expected.difference, expected.p))
    page = (tmp_path / "report.md").read_text()
    assert "| lr=0.2 | 2 of 2 | 0.850 (0.800 to 0.900) |" in page
    assert "| lr=0.2 | reward/all/mean at step 7 | +0.550 |" in page
    assert "lr=0.2" in report.text
    assert {path.name for path in report.files} == {
        *("report.md", "report.html", "results.csv", "results.json", "reward-all-mean.svg", "held-out.svg")
    }
    assert all(path.is_file() for path in report.files)


def test_a_row_per_run_has_what_it_sets_and_what_it_came_to(tmp_path: Path):
    write_report(tmp_path, write_sweep(tmp_path, ENDS), ["loss", "reward/all/mean"])
    first, *_, last = rows(tmp_path)
    assert (first["run"], first["variant"], first["seed"], first["trainer.optim.lr"]) == (
        *("lr=0.1,seed=0", "lr=0.1", "0", "0.1"),
    )
    assert (last["state"], last["steps"], last["seconds"], last["tokens_sampled"]) == ("finished", "7", "14.0", "700")
    assert float(last["reward/all/mean"]) == pytest.approx(0.9)
    assert float(last["loss"]) == pytest.approx((1 / 3 + 1 / 4 + 1 / 5 + 1 / 6 + 1 / 7) / 5)


def test_the_page_is_one_file_that_needs_no_other(tmp_path: Path):
    write_report(tmp_path, write_sweep(tmp_path, ENDS), [])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 2
    assert not re.search(r'\b(src|href)="', page)
    body = page[page.index("<body>") : page.index("</html>")]
    ElementTree.fromstring(body)  # every tag is closed, every text escaped


def test_unfinished_failed_and_waiting_runs_are_listed_as_such(tmp_path: Path):
    known = write_sweep(tmp_path, ENDS)
    record = record_of(tmp_path, grid(0.1, 0.2, 0.3), known)
    record.runs["lr=0.1,seed=1"].outcome = ""
    failed = record.runs["lr=0.3,seed=0"]
    failed.outcome, failed.failure = "failed", "ended with exit status 1; the end of x.log:\n    <no> memory"
    write_report(tmp_path, record, [])
    assert [row["state"] for row in rows(tmp_path)] == [
        *("finished", "unfinished", "finished", "finished", "failed", "waiting"),
    ]
    page = (tmp_path / "report.md").read_text()
    assert "6 runs of 3 variants (3 finished, 1 unfinished, 1 failed, 1 waiting)" in page
    assert "lr=0.3,seed=0: ended with exit status 1; the end of x.log:" in page
    assert "&lt;no&gt; memory" in (tmp_path / "report.html").read_text()


def test_every_metric_that_is_shown_is_tested(tmp_path: Path):
    write_report(tmp_path, write_sweep(tmp_path, ENDS), ["reward/all/mean", "loss"])
    comparison: Any = results_of(tmp_path)["comparison"]
    assert [found["metric"] for found in comparison["differences"]] == ["reward/all/mean", "held-out", "loss"]
    page = (tmp_path / "report.md").read_text()
    assert "| variant | runs | reward/all/mean | held-out | loss | p of reward/all/mean |" in page
    assert "0.219 (0.219 to 0.219)" in page  # the mean of 1/3, 1/4, 1/5, 1/6 and 1/7


def test_a_run_that_has_hardly_begun_does_not_hold_the_finished_ones_back(tmp_path: Path):
    record = write_sweep(tmp_path, ENDS)
    behind = record.runs["lr=0.2,seed=1"]
    behind.outcome = ""
    metrics = tmp_path / behind.name / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]))  # two steps
    write_report(tmp_path, record, [])
    comparison: Any = results_of(tmp_path)["comparison"]
    assert comparison["at"]["reward/all/mean"] == 7
    assert "lr=0.2,seed=1 is unfinished after 2 steps, and not compared." in comparison["notes"]


def test_with_nothing_to_compare_the_report_says_why(tmp_path: Path):
    record = record_of(tmp_path, grid(0.1, 0.2))
    write_record(tmp_path, record)
    report = write_report(tmp_path, record, [])
    assert "a comparison needs at least two runs" in report.text
    assert "(4 waiting)" in (tmp_path / "report.md").read_text()


def test_names_that_were_given_are_explained_by_what_they_set(tmp_path: Path):
    record = write_sweep(tmp_path, ENDS)
    for run in record.planned:
        run.variant = {0.1: "slow", 0.2: "fast"}[run.values["trainer.optim.lr"]]
    write_report(tmp_path, record, [])
    page = (tmp_path / "report.md").read_text()
    assert "## Against slow" in page
    assert "| fast | 0.2 |" in page


def test_the_frontier_is_over_variants_with_the_spread_of_their_seeds(tmp_path: Path):
    record = write_sweep(tmp_path, ENDS)
    right = [True] * 8
    write_evaluation(
        tmp_path,
        {
            "lr=0.1,seed=0": (right[:4] + [False] * 4, 10),
            "lr=0.1,seed=1": (right[:6] + [False] * 2, 20),
            "lr=0.2,seed=0": (right, 40),
            "lr=0.2,seed=1": (right, 60),
        },
    )
    report = write_report(tmp_path, record, [])
    assert {"accuracy.svg", "accuracy-length.svg"} <= {path.name for path in report.files}
    page = (tmp_path / "report.md").read_text()
    assert re.search(r"\| lr=0.1 \| 2 \| 0\.625 \|.* 15\.0 \|", page)
    assert re.search(r"\| lr=0.2 \| 2 \| 1\.000 \|.* 50\.0 \|", page)
    svg = (tmp_path / "accuracy-length.svg").read_text()
    assert "tokens of thinking, mean" in svg
    assert "from the lowest to the highest" in (tmp_path / "accuracy.svg").read_text()
    assert float(rows(tmp_path)[0]["eval/avg@1"]) == 0.5
    for name in ("accuracy.svg", "accuracy-length.svg"):
        check_legible((tmp_path / name).read_text())


def test_of_many_variants_the_best_have_curves_and_every_label_can_be_read(tmp_path: Path):
    ends = {(round(0.001 * n, 3), seed): n / 100 for n in range(1, 21) for seed in (0, 1)}
    write_report(tmp_path, write_sweep(tmp_path, ends), [])
    svg = (tmp_path / "reward-all-mean.svg").read_text()
    assert "(12 of 20)" in svg
    assert "lr=0.009<" in svg
    assert "lr=0.008<" not in svg
    assert "the charts show the 12 best by reward/all/mean" in (tmp_path / "report.md").read_text()
    check_legible(svg)


def test_curves_that_all_end_on_the_axis_have_labels_inside_the_picture(tmp_path: Path):
    write_report(tmp_path, write_sweep(tmp_path, {(n / 10, 0): 0.0 for n in range(1, 13)}), [])
    check_legible((tmp_path / "reward-all-mean.svg").read_text())
