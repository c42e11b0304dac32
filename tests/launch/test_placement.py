"""Which GPUs trainer and servers get."""

import pytest

from headrace.config.base import ConfigError
from headrace.launch.local import PARALLEL, Placement, gpu_env, place, place_trainer
from headrace.machine import VISIBLE_GPUS_VAR, visible_gpus
from tests.refusals import refused


def placed(
    gpus: int, trainer: int | None = None, inference: int | None = None, servers: int | None = None, each: int = 1
) -> Placement:
    names = [str(number) for number in range(gpus)]
    return place(
        names,
        trainer_processes=trainer,
        inference_gpus=inference,
        inference_servers=servers,
        gpus_per_server=each,
    )


def test_without_gpus_the_numbers_of_processes_alone_count():
    assert placed(0) == Placement(1, (), [()])
    assert placed(0, trainer=2, servers=3) == Placement(2, (), [(), (), ()])


def test_one_gpu_is_shared():
    assert placed(1) == Placement(1, ["0"], [["0"]])


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_several_gpus_are_divided_in_two_halves_that_do_not_overlap(gpus: int):
    placement = placed(gpus)
    assert placement.trainer_processes == len(placement.trainer) == gpus // 2
    assert len(placement.inference) == gpus // 2
    used = [*placement.trainer, *(name for share in placement.inference for name in share)]
    assert sorted(used) == [str(number) for number in range(gpus)]


def test_what_is_asked_for_is_given_and_the_rest_goes_to_the_other():
    assert placed(8, trainer=6) == Placement(6, ["2", "3", "4", "5", "6", "7"], [["0"], ["1"]])
    assert placed(4, inference=3, servers=3).inference == [["0"], ["1"], ["2"]]
    assert placed(8, trainer=2, inference=2) == Placement(2, ["2", "3"], [["0"], ["1"]])


def test_a_server_of_several_gpus_gets_neighbours_and_no_part_of_a_server_is_placed():
    assert placed(8, each=2).inference == [["0", "1"], ["2", "3"]]
    assert placed(8, each=4) == Placement(4, ["4", "5", "6", "7"], [["0", "1", "2", "3"]])
    assert placed(6, each=2) == Placement(4, ["2", "3", "4", "5"], [["0", "1"]])
    assert placed(3, each=2) == Placement(1, ["2"], [["0", "1"]])
    assert placed(8, trainer=3, each=2) == Placement(3, ["4", "5", "6"], [["0", "1"], ["2", "3"]])
    assert placed(0, servers=2, each=4) == Placement(1, (), [(), ()])


@pytest.mark.parametrize(
    ("asked", "key", "value"),
    [
        ({"gpus": 0, "inference": 1}, "launch.inference_gpus", 1),
        ({"gpus": 1, "trainer": 2}, "launch", None),
        ({"gpus": 4, "trainer": 3, "inference": 2}, "launch", None),
        ({"gpus": 2, "trainer": 2}, "launch", None),
        ({"gpus": 4, "inference": 3, "servers": 2}, "launch.inference_servers", 2),
        ({"gpus": 1, "each": 2}, PARALLEL, None),
        ({"gpus": 8, "inference": 3, "each": 2}, "launch.inference_gpus", 3),
        ({"gpus": 8, "inference": 4, "servers": 4, "each": 2}, "launch.inference_servers", 4),
        ({"gpus": 4, "each": 4}, "launch", None),
        ({"gpus": 4, "trainer": 3, "each": 2}, "launch", None),
    ],
)
def test_what_does_not_fit_is_refused(asked: dict[str, int], key: str, value: int | None):
    with refused(ConfigError, key=key, value=value):
        placed(**asked)


def test_a_trainer_that_is_alone_takes_every_gpu_or_the_given_number():
    assert place_trainer([], None) == (1, [])
    assert place_trainer([], 3) == (3, [])
    assert place_trainer(["0", "1", "2"], None) == (3, ["0", "1", "2"])
    assert place_trainer(["0", "1", "2"], 2) == (2, ["0", "1"])
    with refused(ConfigError, key="launch.trainer_processes", value=4):
        place_trainer(["0", "1", "2"], 4)


def test_a_process_sees_only_its_gpus_and_the_launcher_only_those_it_may_use(monkeypatch: pytest.MonkeyPatch):
    assert gpu_env(["2", "3"]) == {VISIBLE_GPUS_VAR: "2,3"}
    assert gpu_env(()) == {}
    monkeypatch.setenv(VISIBLE_GPUS_VAR, "4,GPU-abc")
    assert visible_gpus() == ["4", "GPU-abc"]
    monkeypatch.setenv(VISIBLE_GPUS_VAR, "")
    assert visible_gpus() == []
