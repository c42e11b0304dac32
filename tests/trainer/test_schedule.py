"""The learning rate over a run, by hand."""

import math
from typing import Any

import pytest

from headrace.config.trainer import TrainerConfig
from headrace.trainer.optim import learning_rate_factor


def factors(kind: str, max_steps: int = 6, **settings: Any) -> list[float]:
    """Of every step, and of the one after the last."""
    return [learning_rate_factor(step, kind=kind, max_steps=max_steps, **settings) for step in range(1, max_steps + 2)]


def test_constant_stays_where_the_warmup_ends():
    assert factors("constant", warmup_steps=2) == [0.5, 1, 1, 1, 1, 1, 1]
    assert factors("constant", min_factor=0.3) == [1] * 7


def test_linear_falls_from_the_warmup_to_the_minimum():
    assert factors("linear", warmup_steps=2) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    assert factors("linear", warmup_steps=2, min_factor=0.5) == pytest.approx([0.5, 1, 1, 0.875, 0.75, 0.625, 0.5])


def test_cosine_is_halfway_at_half_time():
    assert factors("cosine", min_factor=0.2)[3] == pytest.approx(0.6)
    assert factors("cosine")[6] == pytest.approx(0.0)


def test_a_cosine_with_restarts_starts_from_the_full_rate_in_every_cycle():
    # two warmup steps, then two cycles of four: (1 + cos(pi * k / 4)) / 2 is 1, .8536, .5, .1464
    cycle = [1, 0.853553, 0.5, 0.146447]
    settings = {"warmup_steps": 2, "cycles": 2}
    assert factors("cosine_with_restarts", 10, **settings) == pytest.approx([0.5, 1, *cycle, *cycle, 0], abs=1e-6)
    assert factors("cosine_with_restarts", 10, **settings, min_factor=0.2)[4] == pytest.approx(0.2 + 0.8 * 0.5)
    assert factors("cosine_with_restarts", 7) == pytest.approx(factors("cosine", 7))  # a single cycle


def test_wsd_is_stable_until_its_last_steps():
    assert factors("wsd", 8, warmup_steps=2, decay_steps=4) == pytest.approx([0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert factors("wsd", 4, decay_steps=2, min_factor=0.2) == pytest.approx([1, 1, 1, 0.6, 0.2])


def test_wsd_may_fall_with_the_square_root():
    roots = [1 - math.sqrt(done / 4) for done in range(5)]  # 1, 1/2, 0.29, 0.13, 0
    assert factors("wsd", 6, decay_steps=4, decay_shape="sqrt") == pytest.approx([1, 1, *roots])
    assert factors("wsd", 6, decay_steps=4, decay_shape="sqrt", min_factor=0.1)[3] == pytest.approx(0.1 + 0.9 * 0.5)


def test_wsd_decays_over_a_fraction_of_the_run():
    assert factors("wsd", 10, decay_fraction=0.4) == factors("wsd", 10, decay_steps=4)
    assert factors("wsd", 10, decay_fraction=1.0) == factors("linear", 10)
    assert factors("wsd", 20) == factors("wsd", 20, decay_steps=2)  # a tenth by default


def test_a_warmup_that_reaches_into_the_decay_shortens_it():
    assert factors("wsd", 4, warmup_steps=2, decay_steps=4) == pytest.approx([0.5, 1, 1, 0.5, 0])


def test_a_warmup_longer_than_the_run_is_cut_off():
    assert factors("linear", 2, warmup_steps=4) == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_every_key_of_a_configuration_is_one_of_the_schedule(kind: str):
    scheduler = TrainerConfig.model_validate({"scheduler": {"type": kind}}).scheduler
    assert scheduler.type == kind
    assert factors(scheduler.type, **scheduler.model_dump(exclude={"type"}))[0] == 1.0
