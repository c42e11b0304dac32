"""The size of the KV cache on a GPU, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BadInput
from headrace.inference.embedded import loading
from headrace.inference.embedded.loading import cache_memory
from headrace.inference.memory import ColocatedTrainer, cache_budget

GIB = 1 << 30
LOCK_DIRECTORY = Path("turns")


def gib(size: int) -> float:
    return round(size / GIB, 2)


def test_an_engine_with_a_gpu_of_its_own_takes_most_of_what_is_left() -> None:
    # 1.5 GiB stay for working: 4% of 24 would be less.
    assert gib(cache_budget(22 * GIB, 24 * GIB, 2 * GIB, 10**9, None)) == gib(int(20.5 * GIB * 0.9))
    # 4% of 140, 5.6
    assert gib(cache_budget(130 * GIB, 140 * GIB, 10 * GIB, 10**9, None)) == gib(int(124.4 * GIB * 0.9))
    assert cache_budget(GIB, 24 * GIB, 23 * GIB, 10**9, None) == 0


@pytest.mark.parametrize(("free", "started"), [(22, "nothing"), (17, "a part"), (12, "all of it")])
def test_memory_for_the_trainer_is_set_aside_whether_it_has_started_or_not(free: int, started: str) -> None:
    """24 GiB, of which the engine has 2 and the trainer wants 10 bytes for each of 2**30 parameters: 10.5 are left."""
    shared = ColocatedTrainer(LOCK_DIRECTORY, 10.0)
    assert gib(cache_budget(free * GIB, 24 * GIB, 2 * GIB, GIB, shared)) == gib(int(10.5 * GIB * 0.65)), started


def test_memory_of_other_processes_is_not_used() -> None:
    shared = ColocatedTrainer(LOCK_DIRECTORY, 10.0)
    assert gib(cache_budget(8 * GIB, 24 * GIB, 2 * GIB, GIB, shared)) == gib(int(6.5 * GIB * 0.65))


def test_a_trainer_that_overlaps_leaves_less() -> None:
    assert gib(cache_budget(22 * GIB, 24 * GIB, 2 * GIB, GIB, ColocatedTrainer(None, 10.0))) == gib(
        int(10.5 * GIB * 0.3)
    )


@pytest.mark.parametrize(("free", "are_there"), [(22, "none"), (18, "the other server"), (8, "all"), (12, "trainer")])
def test_several_servers_get_the_same_in_any_order_of_start(free: int, are_there: str) -> None:
    """24 GiB, of which the trainer wants 10: of the 7 for each server its weights take 2, and its work 1.5."""
    shared = ColocatedTrainer(LOCK_DIRECTORY, 10.0, 2)
    assert gib(cache_budget(free * GIB, 24 * GIB, 2 * GIB, GIB, shared)) == gib(int(3.5 * GIB * 0.65)), are_there


def test_a_gpu_that_is_too_small_for_both_is_refused_with_the_numbers() -> None:
    with pytest.raises(BadInput) as error:
        cache_budget(20 * GIB, 24 * GIB, 4 * GIB, 2 * GIB, ColocatedTrainer(LOCK_DIRECTORY, 11.0))
    assert all(number in error.value.fact for number in ("24.0 GiB", "22.0 GiB", "4.0 GiB"))
    assert all(key in error.value.fix for key in ("trainer.lora", "offload_state", "kv_cache_gb"))


def test_a_configured_size_is_used_and_a_cpu_gives_an_eighth(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda: 16 * GIB)
    assert cache_memory(model, None, None) == 2 * GIB
    assert cache_memory(model, 0.5, ColocatedTrainer(LOCK_DIRECTORY, 14.0)) == 500_000_000
