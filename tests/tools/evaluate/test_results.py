"""From episodes to numbers, worked by hand."""

import csv
import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from headrace.tools.evaluate.completions import Correctness, ScoredEpisode
from headrace.tools.evaluate.report import format_csv, length_table, sampling_line
from headrace.tools.evaluate.results import (
    ModelResult,
    ZeroShot,
    choose_score,
    compute_result,
    notices,
    zero_shot_record,
)

EPISODES = [
    ScoredEpisode("a", 0, True, 1.2, {"correct": 1.0, "format": 0.2}, {"turns": 1.0}, True, 10, 6, 3),
    ScoredEpisode(
        "a", 1, False, 0.2, {"correct": 0.0, "format": 0.2}, {"turns": None}, True, 20, 14, 5, truncated=True
    ),
    ScoredEpisode("b", 0, False, 0.0, {"correct": 0.0, "format": 0.0}, {}, False, 30),
    ScoredEpisode("b", 1, error="timeout"),
]


def test_numbers_are_means_over_examples_and_what_failed_is_left_out():
    result = compute_result("m", "models/m", EPISODES, 2, Correctness())
    values = {name: estimate.value for name, estimate in result.estimates.items()}
    assert values == pytest.approx(
        {
            "avg@2": 0.35,  # a: 0.7, b: 0 of the one that ended
            "pass@1": 0.25,  # a: 1/2, b: 0
            "pass@2": 1.0,  # a alone has two, one of them right
            "format": 0.5,  # a: 1, b: 0 of the one that ended
            "tokens": 22.5,  # a: 15, b: 30
            "thinking_tokens": 10.0,  # a alone: (6 + 14) / 2
            "thinking_words": 4.0,
            "thinks": 0.5,
            "truncated": 0.25,
            "failed": 0.25,
            "reward/correct": 0.25,
            "reward/format": 0.1,
            "metric/turns": 1.0,  # one that was not a number is left out
        }
    )
    assert (result.examples, result.samples, result.errors) == (2, 2, {"timeout": 1})
    assert (result.estimates["pass@1"].low, result.estimates["pass@1"].high) == (0.0, 0.5)


def test_pass_rates_need_right_and_wrong_or_a_threshold():
    graded = [
        ScoredEpisode("a", 0, reward=0.4),
        ScoredEpisode("a", 1, reward=1.0),
        ScoredEpisode("b", 0, reward=0.6),
        ScoredEpisode("b", 1),
    ]
    names = compute_result("m", "models/m", graded, 2, Correctness()).estimates
    assert "avg@2" in names and not [name for name in names if name.startswith("pass@")]
    solved = compute_result("m", "models/m", graded, 2, Correctness(solved=0.5)).estimates
    assert (solved["avg@2"].value, solved["pass@1"].value, solved["pass@2"].value) == (0.5, 0.5, 1.0)


def test_models_are_compared_by_accuracy_only_where_all_have_one():
    assert choose_score([{"avg@4", "pass@1"}, {"avg@4", "pass@1"}], 4) == ("pass@1", "accuracy")
    assert choose_score([{"avg@4", "pass@1"}, {"avg@4"}], 4) == ("avg@4", "mean reward")


def test_more_than_a_twentieth_that_failed_is_a_notice():
    few = [ScoredEpisode(str(number), 0, error="timeout" if number == 0 else "") for number in range(20)]
    assert len(list(notices(compute_result("m", "models/m", few, 1, Correctness()), few))) == 1  # about reasoning
    *_, notice = notices(compute_result("m", "models/m", EPISODES, 2, Correctness()), EPISODES)
    assert "25%" in notice and "1 timeout" in notice


def test_the_measures_are_those_that_the_page_explains():
    page = (Path(__file__).parents[3] / "docs" / "how-to/evaluation.md").read_text().partition("## What is measured")[2]
    rows = re.findall(r"^\| (`.*?) \|", page.partition("\n## ")[0], re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)} | {"thinks"}  # in the row of thoughts
    measured = {
        re.sub("/.*", "/NAME", name.replace("avg@2", "avg@K").replace("pass@1", "pass@k").replace("pass@2", "pass@k"))
        for name in compute_result("m", "models/m", EPISODES, 2, Correctness()).estimates
    }
    assert measured == documented


def test_the_zero_shot_record_has_a_line_per_example_that_was_answered():
    assert zero_shot_record(EPISODES) == [ZeroShot("a", False, 10), ZeroShot("b", False, 0)]  # half is not most
    assert zero_shot_record(
        [ScoredEpisode("c", 0, True, thinking_tokens=5), ScoredEpisode("d", 0, error="engine")]
    ) == [ZeroShot("c", True, 5)]


def test_lengths_have_a_median_a_deviation_and_quantiles_over_episodes():
    lengths = compute_result("m", "models/m", EPISODES, 2, Correctness()).lengths
    # Of 10, 20, 30: quantiles lie between neighbours in proportion, the deviation is sqrt(200 / 3).
    assert msgspec.structs.asdict(lengths["tokens"]) == pytest.approx(
        {"median": 20, "std": 8.16497, "min": 10, "p5": 11, "p25": 15, "p75": 25, "p95": 29, "max": 30}, abs=1e-5
    )
    assert (lengths["thinking_tokens"].median, lengths["thinking_words"].std) == (10.0, 1.0)
    assert compute_result("m", "models/m", [ScoredEpisode("a", 0, tokens=None)], 1, Correctness()).lengths == {}


def test_csv_and_terminal_have_the_spread_of_lengths_beside_the_mean():
    results = [
        compute_result("m", "models/m", EPISODES, 2, Correctness()),
        ModelResult("n", "models/n", failure="does not load"),
    ]
    known, failed = csv.DictReader(io.StringIO(format_csv(results)))
    assert (known["tokens"], known["tokens_median"], known["tokens_p95"]) == ("22.5", "20.0", "29.0")
    assert (known["thinking_words_min"], failed["tokens_median"]) == ("3.0", "")
    console = Console(width=160, file=io.StringIO())
    console.print(length_table(results))
    row = next(line for line in console.file.getvalue().splitlines() if "tokens" in line)
    assert " ".join(row.replace("│", "").split()) == "m tokens 22.5 20.0 8.2 10.0 11.0 15.0 25.0 29.0 30.0"


def test_the_sampling_settings_are_one_line():
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": None, "min_p": 0.1, "max_tokens": None}
    line = sampling_line({"sampling": sampling, "samples": 8, "seed": 3, "seq_len": None})
    assert line == "sampling: temperature = 0.8, top_p = 0.9, max_tokens = unset, n = 8, seed = 3, min_p = 0.1"


def test_a_table_of_values_has_every_model_those_that_failed_included():
    results = [
        compute_result("m", "models/m", EPISODES, 2, Correctness()),
        ModelResult("n", "models/n", failure="does not load, at all"),
    ]
    rows = list(csv.DictReader(io.StringIO(format_csv(results))))
    assert [(row["model"], row["avg@2"], row["avg@2_high"], row["error/timeout"], row["failure"]) for row in rows] == [
        ("m", "0.35", "0.7", "1", ""),
        ("n", "", "", "0", "does not load, at all"),
    ]
