"""Comparison of runs: variants, runs that are left out, and the choice of the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.errors import BadInput
from headrace.observe.metrics import MetricsLog
from headrace.tools.compare.comparison import RunComparison, compare_runs
from headrace.tools.compare.inputs import differences, group_by_variant, settings_of
from headrace.tools.compare.significance import bootstrap, welch
from headrace.tools.compare.view import describe_differences, format_comparison, write_page
from tests.observe.runs import write_episodes, write_evaluation, write_run


def flat(end: float) -> list[float]:
    """Seven steps; the last five, which count, come to `end`."""
    return [0.0, 0.1, *[end] * 5]


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    """Two learning rates with two seeds each."""
    ends = {(1e-4, 0): 0.2, (1e-4, 1): 0.4, (1e-3, 0): 0.8, (1e-3, 1): 0.9}
    return [
        write_run(
            tmp_path / f"lr-{lr}-{seed}", flat(end), {0: 0.1, 7: end}, keys={"trainer.optim.lr": lr, "seed": seed}
        )
        for (lr, seed), end in ends.items()
    ]


def test_only_keys_that_differ_are_listed_and_a_shared_key_once(seeds: list[Path]):
    variants = compare_runs(seeds).comparison.variants
    assert [variant.settings for variant in variants] == [{"trainer.optim.lr": 1e-4}, {"trainer.optim.lr": 1e-3}]


def test_a_copy_of_a_shared_key_is_listed_if_it_has_another_value():
    one = settings_of({"seq_len": 64, "trainer": {"seq_len": 64}, "orchestrator": {"seq_len": 64}})
    two = settings_of({"seq_len": 32, "trainer": {"seq_len": 32}, "orchestrator": {"seq_len": 16}})
    assert differences([one, two]) == {"seq_len": [64, 32], "orchestrator.seq_len": [64, 16]}


def test_paths_and_ports_of_a_run_are_not_compared():
    one = settings_of({"output_dir": "a", "trainer": {"output_dir": "a"}, "inference": {"port": 1}, "lr": 1})
    two = settings_of({"output_dir": "b", "wandb": {"name": "b"}, "inference": {"port": 2}, "lr": 1})
    assert differences([one, two]) == {}


def test_members_of_a_list_of_tables_are_compared_one_by_one():
    one = settings_of({"train": {"env": [{"id": "a", "ratio": 1.0}, {"id": "b"}]}})
    two = settings_of({"train": {"env": [{"id": "a", "ratio": 2.0}]}})
    assert differences([one, two]) == {"train.env.0.ratio": [1.0, 2.0], "train.env.1.id": ["b", None]}


def test_runs_that_differ_in_their_seeds_alone_are_one_variant():
    trees = [{"seed": seed, "trainer": {"seed": seed, "lr": lr}} for lr, seed in ((1, 0), (2, 0), (1, 5))]
    assert group_by_variant([settings_of(tree) for tree in trees]) == [[0, 2], [1]]


def test_an_environments_seed_is_the_runs_where_it_was_filled_from_it_and_a_setting_where_it_is_not():
    def tree(seed: int, of_data: int) -> dict[str, Any]:
        return {"seed": seed, "orchestrator": {"train": {"env": [{"id": "hackable", "args": {"seed": of_data}}]}}}

    runs = [settings_of(tree(*seeds)) for seeds in ((0, 0), (1, 1), (1, 7))]
    assert group_by_variant(runs) == [[0, 1], [2]]
    assert differences(runs[:2]) == {"seed": [0, 1]}
    assert differences(runs[1:]) == {"orchestrator.train.env.0.args.seed": [1, 7]}


def test_variants_with_several_seeds_are_tested_by_welch_over_what_they_came_to(seeds: list[Path]):
    comparison = compare_runs(seeds).comparison
    reward, held_out = comparison.differences
    expected = welch([0.2, 0.4], [0.8, 0.9])
    assert expected is not None
    for found in (reward, held_out):
        assert found.method == "welch"
        assert (found.difference, found.low, found.high, found.p) == pytest.approx(expected)
    assert [variant.name for variant in comparison.variants] == ["lr 0.0001", "lr 0.001"]
    spread = comparison.variants[0].ends["reward/all/mean"]
    assert (spread.mean, spread.lowest, spread.highest) == pytest.approx((0.3, 0.2, 0.4))


def test_a_single_seed_is_held_against_several_with_the_sign_of_the_variant(seeds: list[Path]):
    up = compare_runs([seeds[2], seeds[0], seeds[1]]).comparison.differences[0]
    down = compare_runs([seeds[0], seeds[1], seeds[2]]).comparison.differences[0]
    assert up.method == down.method == "one_against_several"
    assert up.difference == pytest.approx(0.3 - 0.8)
    assert (down.difference, down.low, down.high) == pytest.approx((0.5, -(up.high or 0), -(up.low or 0)))
    assert "lr 0.001 has one seed" in down.note


def test_two_runs_are_compared_by_a_bootstrap_over_their_last_steps(seeds: list[Path]):
    reward, held_out = compare_runs([seeds[0], seeds[2]]).comparison.differences
    assert reward.method == "bootstrap_of_steps"
    expected = bootstrap(flat(0.2), flat(0.8), paired=False)
    assert (reward.difference, reward.low, reward.high, reward.p) == pytest.approx(expected)
    assert "last 7 steps" in reward.note
    assert (held_out.method, held_out.difference, held_out.p) == ("none", pytest.approx(0.6), None)


def test_two_runs_with_scores_per_example_are_drawn_again_over_these(seeds: list[Path], tmp_path: Path):
    evaluation = tmp_path / "evaluation"
    first = {f"task-{n}": [n % 2 == 0, False] for n in range(10)}
    second = {f"task-{n}": [True, n % 2 == 0] for n in range(10)}
    write_episodes(evaluation, "one", seeds[0], first)
    write_episodes(evaluation, "deep/two", seeds[2], second)
    for run in (seeds[0], seeds[2]):
        write_evaluation(run, 7, "reverse-text", {"task-0": [0.0]})  # not used: the other evaluation is named
    _, held_out, found = compare_runs([seeds[0], seeds[2]], evaluation=evaluation).comparison.differences
    assert held_out.method == "none"
    # Every example has one more of its two samples right.
    assert (found.metric, found.method) == ("accuracy", "bootstrap_of_examples")
    assert (found.difference, found.low, found.high) == (0.5, 0.5, 0.5)
    assert "10 held-out examples" in found.note


def test_two_runs_that_saved_their_evaluations_are_drawn_again_over_the_examples_of_the_last_common_step(
    tmp_path: Path,
):
    low = write_run(tmp_path / "low", flat(0.2), {0: 0.1, 4: 0.25, 7: 0.9}, keys={"trainer.optim.lr": 1e-4})
    high = write_run(tmp_path / "high", flat(0.2), {0: 0.1, 4: 0.75, 6: 0.9}, keys={"trainer.optim.lr": 1e-3})
    for run, reward, own_step in ((low, 0.0, 7), (high, 0.5, 6)):
        write_evaluation(run, 4, "reverse-text", {f"task-{n}": [reward, reward + 0.5, None] for n in range(5)})
        write_evaluation(run, own_step, "reverse-text", {"task-0": [0.9]})
    compared = compare_runs([low, high]).comparison
    *_, found = compared.differences
    assert (found.metric, found.method, compared.at["held-out"]) == ("held-out", "bootstrap_of_examples", 4)
    assert (found.difference, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert "5 held-out examples" in found.note


def test_every_environment_counts_alike_however_many_examples_it_has(tmp_path: Path):
    runs = [
        write_run(tmp_path / name, flat(0.2), keys={"trainer.optim.lr": lr}) for name, lr in (("a", 1e-4), ("b", 1))
    ]
    for run, small in zip(runs, (0.0, 1.0), strict=True):
        MetricsLog(run / "metrics.jsonl", "orchestrator").log(7, {"eval/large/avg@1": 0.5, "eval/small/avg@1": small})
        write_evaluation(run, 7, "large", {f"task-{n}": [0.5] for n in range(9)})
        write_evaluation(run, 7, "small", {"task-0": [small]})
    *_, found = compare_runs(runs).comparison.differences
    assert (found.method, found.difference) == ("bootstrap_of_examples", pytest.approx(0.5))


def test_a_saved_evaluation_that_lacks_an_environment_is_not_drawn_from(tmp_path: Path):
    runs = [
        write_run(tmp_path / name, flat(0.2), keys={"trainer.optim.lr": lr}) for name, lr in (("a", 1e-4), ("b", 1))
    ]
    for run in runs:
        MetricsLog(run / "metrics.jsonl", "orchestrator").log(7, {"eval/large/avg@1": 0.5, "eval/small/avg@1": 0.5})
        write_evaluation(run, 7, "large", {"task-0": [0.5]})
    assert compare_runs(runs).comparison.differences[-1].method == "none"


def test_a_run_without_episodes_leaves_accuracies_out_with_a_note(seeds: list[Path], tmp_path: Path):
    write_episodes(tmp_path / "evaluation", "one", seeds[0], {"a": [True]})
    comparison = compare_runs([seeds[0], seeds[2]], evaluation=tmp_path / "evaluation").comparison
    assert {found.metric for found in comparison.differences} == {"reward/all/mean", "held-out"}
    assert any("has no episodes of lr-0.001-0" in note for note in comparison.notes)


def test_runs_of_one_variant_have_a_spread_and_no_difference(seeds: list[Path]):
    comparison = compare_runs(seeds[:2]).comparison
    assert comparison.differences == []
    assert "only in their seeds" in describe_differences(comparison)[0]


def test_an_unfinished_run_is_compared_as_far_as_it_went(tmp_path: Path):
    whole = write_run(tmp_path / "whole", [0.1] * 10 + [0.9] * 10)
    broken = write_run(tmp_path / "broken", [0.3] * 10, keys={"max_steps": 20, "trainer.optim.lr": 1e-3})
    comparison = compare_runs([whole, broken]).comparison
    (note,) = comparison.notes
    assert note.startswith("broken has done 10 of 20 steps")
    assert comparison.at == {"reward/all/mean": 10}
    assert comparison.differences[0].difference == pytest.approx(0.2)


def test_a_directory_that_is_not_a_run_is_left_out_with_a_note(seeds: list[Path], tmp_path: Path):
    (tmp_path / "empty").mkdir()
    silent = write_run(tmp_path / "silent", [])
    MetricsLog(silent / "metrics.jsonl", "orchestrator").log(0, {"eval/reverse-text/avg@1": 0.5})
    comparison = compare_runs([seeds[0], tmp_path / "gone", tmp_path / "empty", silent, seeds[2]]).comparison
    assert [run.name for run in comparison.runs] == ["lr-0.0001-0", "lr-0.001-0"]
    gone, empty, without = comparison.notes
    assert gone.endswith("gone is left out: no such directory.")
    assert "config.toml" in empty
    assert without.startswith("silent is left out: it has not reported reward/all/mean; it has eval/")


def test_fewer_than_two_runs_are_refused_with_all_reasons(seeds: list[Path], tmp_path: Path):
    with pytest.raises(BadInput, match=r"gone is left out[\s\S]*at least two runs that have reported reward/all/mean"):
        compare_runs([seeds[0], tmp_path / "gone"])
    with pytest.raises(BadInput, match="there are 0"):
        compare_runs(seeds[:2], metric="rewards")


def test_any_metric_can_be_compared_and_of_a_loss_the_lowest_is_best(seeds: list[Path]):
    comparison = compare_runs(seeds[1:3], metric="loss").comparison
    assert comparison.runs[0].metric.best == comparison.runs[0].metric.last == pytest.approx(1 / 7)
    held_out = compare_runs(seeds[1:3], metric="eval/reverse-text/avg@1").comparison
    assert [found.metric for found in held_out.differences] == ["eval/reverse-text/avg@1"]
    assert held_out.runs[1].metric == held_out.runs[1].evaluations["reverse-text"]


def test_runs_without_rewards_are_compared_by_their_loss(tmp_path: Path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for number, run in enumerate(runs):
        write_run(run, [], keys={"trainer.optim.lr": 1e-4 * (number + 1)})
        MetricsLog(run / "metrics.jsonl", "trainer").log(1, {"loss": 2.0})
    comparison = compare_runs(runs).comparison
    assert (comparison.metric, comparison.differences[0].method) == ("loss", "none")


def test_steps_that_a_resume_made_again_count_once(seeds: list[Path]):
    log = MetricsLog(seeds[0] / "metrics.jsonl", "orchestrator")
    log.log(6, {"reward/all/mean": 0.7, "progress/rollouts": 1})
    assert compare_runs(seeds[:3:2]).comparison.runs[0].metric.last == 0.7
    assert compare_runs(seeds[:3:2]).comparison.at["reward/all/mean"] == 6


def test_the_text_has_the_differences_the_runs_and_the_sentences(seeds: list[Path]):
    shown = format_comparison(compare_runs(seeds).comparison)
    lines = [line.split() for line in shown.splitlines()]
    assert ["trainer.optim.lr", "0.0001", "0.001"] in lines
    assert ["seed", "0,", "1", "0,", "1"] in lines
    row = ["lr-0.001-1", "0.000", "0.900", "0.900", "0.100", "to", "0.900", "7", "14", "s", "700", "630"]
    assert row in lines
    assert "lr 0.001 against lr 0.0001, reward/all/mean at step 7: +0.550" in shown
    assert "2 differences were tested, so each is significant only if p < 0.025." in shown


def test_the_page_has_a_chart_per_metric_and_the_same_numbers_as_json(seeds: list[Path], tmp_path: Path):
    compared = compare_runs(seeds)
    files = write_page(compared, tmp_path / "page")
    assert [path.name for path in files] == [
        "comparison.md",
        "comparison.json",
        "reward-all-mean.svg",
        "held-out.svg",
    ]
    page = files[0].read_text()
    assert all(f"({chart.name})" in page for chart in files[2:])
    assert msgspec.json.decode(files[1].read_bytes(), type=RunComparison) == compared.comparison
    assert files[2].read_text().count('stroke-width="2.5"') == 4  # a line and its entry in the legend for each variant
