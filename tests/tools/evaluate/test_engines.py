"""How models are distributed over the engines of a machine."""

import pytest

from headrace.errors import BadInput
from headrace.tools.evaluate.servers import EngineSet, Machine, gpus_per_engine, plan_engine_sets

ROOM = 64 << 30


def gpus_of(teams: list[EngineSet]) -> list[list[str]]:
    return [[engine["CUDA_VISIBLE_DEVICES"] for engine in team] for team in teams]


def test_every_gpu_has_an_engine_and_models_take_turns_on_them():
    teams = plan_engine_sets(Machine(["0", "1", "2", "3"], 16, ROOM), None, 1, models=9)
    assert gpus_of(teams) == [["0"], ["1"], ["2"], ["3"]]
    assert {engine["OMP_NUM_THREADS"] for team in teams for engine in team} == {"4"}


def test_fewer_models_than_gpus_have_several_engines_each():
    machine = Machine(["0", "1", "2", "3", "4"], 16, ROOM)
    assert gpus_of(plan_engine_sets(machine, None, 1, models=2)) == [["0", "1"], ["2", "3"]]
    assert gpus_of(plan_engine_sets(machine, None, 1, models=1)) == [["0", "1", "2", "3", "4"]]


def test_an_engine_of_several_gpus_has_them_for_itself():
    machine = Machine(["0", "1", "2", "3", "4"], 16, ROOM)
    assert gpus_of(plan_engine_sets(machine, None, 2, models=3)) == [["0,1"], ["2,3"]]


def test_without_gpus_engines_are_bounded_by_models_cores_and_memory():
    assert len(plan_engine_sets(Machine([], 16, ROOM), None, 1, models=3)) == 3
    assert len(plan_engine_sets(Machine([], 8, ROOM), None, 1, models=9)) == 4
    assert len(plan_engine_sets(Machine([], 16, 5 << 30), None, 1, models=9)) == 2
    assert plan_engine_sets(Machine([], 2, ROOM), None, 1, models=9) == [[{}]]  # alone, it uses what there is


def test_the_number_of_engines_can_be_set():
    two = plan_engine_sets(Machine([], 2, ROOM), 2, 1, models=9)
    assert [[engine["OMP_NUM_THREADS"] for engine in team] for team in two] == [["1"], ["1"]]
    assert [len(team) for team in plan_engine_sets(Machine([], 2, ROOM), 2, 1, models=1)] == [2]
    assert gpus_of(plan_engine_sets(Machine(["0", "1"], 8, ROOM), 1, 1, models=9)) == [["0"]]


@pytest.mark.parametrize(("wanted", "each"), [(3, 1), (None, 4)])
def test_more_engines_than_the_gpus_take_are_refused(wanted: int | None, each: int):
    with pytest.raises(BadInput) as error:
        plan_engine_sets(Machine(["0", "1"], 8, ROOM), wanted, each, models=1)
    assert (error.value.key, error.value.value) == ("--engines", wanted)


def test_the_gpus_of_an_engine_follow_from_the_options_of_its_server():
    assert gpus_per_engine([]) == 1
    assert gpus_per_engine(["--engine=vllm", "--vllm.tensor_parallel_size=2", "--vllm.data_parallel_size=2"]) == 4
    with pytest.raises(BadInput):
        gpus_per_engine(["--no_such_option=1"])
