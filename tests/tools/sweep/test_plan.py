"""Which runs a file asks for: points, seeds, names, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError, Tree
from headrace.runfile.reading import parse_overrides, validate
from headrace.tools.sweep.config import SweepConfig, flatten, override_words, read_sweep
from headrace.tools.sweep.plan import draw, folder_name, plan_runs
from tests.refusals import refused


def sweep(**keys: Any) -> SweepConfig:
    tree: Tree = {"run": "rl.toml", "output_dir": "outputs/sweep", **keys}
    return validate(SweepConfig, tree, "sweep.yaml")[0]


def test_a_grid_is_every_combination_with_every_seed_the_last_key_fastest():
    runs = plan_runs(sweep(grid={"trainer.optim.lr": [1e-5, 0.1], "max_steps": [2, 3]}, seeds=[0, 7]))
    assert [run.label for run in runs[:5]] == [
        "lr=1e-05,max_steps=2,seed=0",
        "lr=1e-05,max_steps=2,seed=7",
        "lr=1e-05,max_steps=3,seed=0",
        "lr=1e-05,max_steps=3,seed=7",
        "lr=0.1,max_steps=2,seed=0",
    ]
    assert len(runs) == 8
    assert runs[3].overrides({"seq_len": 64}) == {
        "seq_len": 64,
        "trainer.optim.lr": 1e-5,
        "max_steps": 3,
        "seed": 7,
    }


def test_keys_may_be_nested_as_toml_has_them():
    nested = sweep(grid={"trainer": {"optim": {"lr": [1, 2]}}})
    assert [run.values for run in plan_runs(nested)] == [{"trainer.optim.lr": 1}, {"trainer.optim.lr": 2}]
    assert flatten({"a.b": 1, "a": {"b": 2, "c": [{"d": 3}]}}) == {"a.b": 2, "a.c": [{"d": 3}]}


def test_keys_are_named_by_as_few_last_parts_as_distinguish_them():
    runs = plan_runs(sweep(grid={"trainer.seq_len": [1], "orchestrator.seq_len": [2]}))
    assert runs[0].label == "trainer.seq_len=1,orchestrator.seq_len=2"


def test_entries_of_a_list_have_their_names_or_what_they_set():
    runs = plan_runs(sweep(list=[{}, {"name": "brief", "a.lambda": 1.0}, {"a": {"gate": True}, "b.levels": [1, 2]}]))
    assert [run.variant for run in runs] == ["base", "brief", "gate=true,levels=1+2"]
    assert [run.values for run in runs] == [{}, {"a.lambda": 1.0}, {"a.gate": True, "b.levels": [1, 2]}]
    assert [run.seed for run in runs] == [None] * 3


def test_values_that_read_alike_have_names_that_do_not():
    one, other = plan_runs(sweep(grid={"key": [1, "1"]}))
    assert one.variant != other.variant
    assert one.variant.startswith("key=1-")


RANDOM = {
    "num": 50,
    "keys": {
        "trainer.optim.lr": {"log_uniform": [1e-6, 1e-4]},
        "x": {"uniform": [0.25, 0.5]},
        "trainer": {"steps": {"integers": [2, 4]}},
        "kind": {"choice": ["a", "b"]},
    },
}


def test_drawn_values_are_the_same_under_the_same_seed_and_in_their_ranges():
    runs = plan_runs(sweep(random=RANDOM))
    assert runs == plan_runs(sweep(random=RANDOM))
    assert runs != plan_runs(sweep(random={**RANDOM, "seed": 1}))
    values = [run.values for run in runs]
    assert all(1e-6 <= point["trainer.optim.lr"] <= 1e-4 for point in values)
    assert sum(point["trainer.optim.lr"] < 1e-5 for point in values) in range(15, 36)  # half of the logarithms
    assert all(0.25 <= point["x"] <= 0.5 for point in values)
    assert {point["trainer.steps"] for point in values} == {2, 3, 4}
    assert {point["kind"] for point in values} == {"a", "b"}


def test_more_points_or_another_key_leave_the_drawn_values_as_they_were():
    runs = plan_runs(sweep(random=RANDOM))
    assert plan_runs(sweep(random={**RANDOM, "num": 20})) == runs[:20]
    more = plan_runs(sweep(random={"num": 50, "keys": {**RANDOM["keys"], "y": {"uniform": [0, 1]}}}))
    assert [{key: run.values[key] for key in runs[0].values} for run in more] == [run.values for run in runs]


def test_a_draw_has_four_digits_within_its_range():
    assert draw("uniform", [0.123411, 0.123412], random.Random(0)) == 0.123411
    drawn = draw("uniform", [0, 1], random.Random(0))
    assert drawn == float(f"{drawn:.4g}")


def test_points_that_were_drawn_twice_count_once():
    runs = plan_runs(sweep(random={"num": 3, "keys": {"n": {"choice": [1, 2, 3]}}}))
    assert sorted(run.values["n"] for run in runs) == [1, 2, 3]
    with refused(ConfigError, key="random.num", value=4):
        plan_runs(sweep(random={"num": 4, "keys": {"n": {"choice": [1, 2, 3]}}}))


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({}, "grid"),
        ({"grid": {"a": [1]}, "list": [{"a": 1}]}, "list"),
        ({"grid": {}}, "grid"),
        ({"grid": {"a": 1}}, "grid.a"),
        ({"grid": {"a": [1, 2, 1]}}, "grid.a"),
        ({"grid": {"a": [1]}, "overrides": {"a": 2}}, "a"),
        ({"grid": {"output_dir": ["x"]}}, "output_dir"),
        ({"grid": {"a": [None]}}, "a"),
        ({"grid": {"seed": [1]}, "seeds": [1]}, "seed"),
        ({"grid": {"a": [1]}, "seeds": [1, 1]}, "seeds"),
        ({"grid": {"a": [1]}, "parallel": 0}, "parallel"),
        ({"grids": {"a": [1]}}, "grids"),
        ({"list": [{"a": 1}, {"name": "x", "a": 1}]}, "list.1"),
        ({"list": [{"name": "x"}, {"name": "x", "a": 1}]}, "list.1.name"),
        ({"random": {"num": 1, "keys": {"a": {"unifrom": [0, 1]}}}}, "random.keys.a.unifrom"),
        ({"random": {"num": 1, "keys": {"a": {"uniform": [0, 1], "choice": [2]}}}}, "random.keys.a.choice"),
        ({"random": {"num": 1, "keys": {"uniform": [0, 1]}}}, "random.keys.uniform"),
        ({"random": {"num": 1, "keys": {"a": {"uniform": [1, 0]}}}}, "random.keys.a.uniform"),
        ({"random": {"num": 1, "keys": {"a": {"integers": [0, 1.5]}}}}, "random.keys.a.integers"),
        ({"random": {"num": 1, "keys": {"a": {"log_uniform": [0, 1]}}}}, "random.keys.a.log_uniform"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_key(keys: Tree, key: str | None):
    with refused(ConfigError, key=key):
        plan_runs(sweep(**keys))


@pytest.mark.parametrize(
    "value", [1, 1e-05, -0.5, True, "true", 'a "b" = \\c', "--x", [1, [2.5]], {"a b": {"c": ["d"]}}]
)
def test_a_value_survives_the_command_line(value: Any):
    assert parse_overrides(override_words({"some.key": value})) == [(["some", "key"], value)]


def test_folders_are_fit_for_file_systems_and_never_two_alike():
    assert folder_name("lr=1e-05,seed=0", []) == "lr=1e-05,seed=0"
    assert folder_name("a/b: c", []) == "a-b-c"
    assert folder_name("EVAL", []).startswith("EVAL-")  # the folder of the evaluation, where case does not count
    assert folder_name("a", ["A"]) != "a"
    long = folder_name("x" * 300, [])
    assert len(long) == 100
    assert long != folder_name("x" * 301, [])


def test_run_files_are_found_beside_the_sweep_and_typed_ones_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "deep"
    folder.mkdir()
    for path in (folder / "rl.toml", folder / "more.toml", tmp_path / "typed.toml"):
        path.write_text("")
    monkeypatch.chdir(tmp_path)
    file = Path("deep/sweep.yaml")
    file.write_text("run: [rl.toml, more.toml]\ngrid: {a: [1]}")
    assert read_sweep([file], []).files == [folder / "rl.toml", folder / "more.toml"]
    assert read_sweep([file], ["--run", "typed.toml"]).files == [tmp_path / "typed.toml"]
    with refused(ConfigError, key="run", value=tmp_path / "gone.toml"):
        read_sweep([file], ["--run", "gone.toml"])


def test_a_second_file_changes_the_first_and_names_run_files_beside_itself(tmp_path: Path):
    folder = tmp_path / "small"
    folder.mkdir()
    for path in (tmp_path / "rl.toml", folder / "size.toml"):
        path.write_text("")
    (tmp_path / "sweep.yaml").write_text("run: rl.toml\ngrid: {a: [1, 2]}\nseeds: [0, 1]")
    (folder / "sweep.yaml").write_text("run: [../rl.toml, size.toml]\nseeds: [7]")
    sweep = read_sweep([tmp_path / "sweep.yaml", folder / "sweep.yaml"], [])
    assert sweep.files == [tmp_path / "rl.toml", folder / "size.toml"]
    assert [run.label for run in plan_runs(sweep)] == ["a=1,seed=7", "a=2,seed=7"]
