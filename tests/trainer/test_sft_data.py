"""Which conversation comes when: order, resuming, what is held out, and what is cut."""

import logging
from itertools import islice

import numpy as np
import pytest

from headrace.environments.shipped.reverse_text import ReverseText
from headrace.errors import DataError
from headrace.rollout.types import Sample
from headrace.text.training_examples import SftConversation
from headrace.trainer.sft_data import (
    Examples,
    TruncationMonitor,
    fixed_sample,
    from_environment,
    from_rows,
    hold_out,
)
from tests.refusals import refused
from tests.trainer.training_samples import make_sample


def numbered(count: int) -> list[SftConversation]:
    return [SftConversation([{"role": "assistant", "content": str(number)}]) for number in range(count)]


def numbers(rows: Examples) -> list[int]:
    return [int(rows[index].messages[0]["content"]) for index in range(len(rows))]


def test_each_pass_has_its_own_order_and_any_position_continues_it():
    rows = numbered(7)

    def contents(seed: int, position: int, count: int) -> list[int]:
        return numbers(list(islice(from_rows(rows, seed, position), count)))

    whole = contents(0, 0, 21)
    assert sorted(whole[:7]) == sorted(whole[7:14]) == sorted(whole[14:])
    assert whole[:7] != whole[7:14]
    assert contents(1, 0, 21) != whole
    assert sorted(contents(-1, 0, 7)) == list(range(7))
    for position in (0, 3, 7, 13, 20):
        assert contents(0, position, 21 - position) == whole[position:]


def test_demonstrations_continue_at_any_position():
    environment = ReverseText()
    whole = [c.messages for c in islice(from_environment(environment, 3, 0), 10)]
    assert [c.messages for c in islice(from_environment(environment, 3, 6), 4)] == whole[6:]


@pytest.mark.parametrize(("count", "fraction", "held"), [(20, 0.25, 5), (7, 0.2, 1), (3, 0.01, 1), (2, 0.5, 1)])
def test_a_fraction_is_held_out_exactly_and_trained_on_never(count: int, fraction: float, held: int):
    rows = numbered(count)
    kept, out = (numbers(part) for part in hold_out(rows, fraction, seed=0))
    assert (len(out), sorted(kept + out)) == (held, list(range(count)))
    assert [numbers(part) for part in hold_out(rows, fraction, seed=0)] == [kept, out]


def test_another_seed_holds_out_other_rows():
    first, second = (numbers(hold_out(numbered(50), 0.2, seed)[1]) for seed in (0, 1))
    assert sorted(first) != sorted(second)


@pytest.mark.parametrize(("count", "fraction"), [(1, 0.1), (2, 0.9)])
def test_holding_out_everything_is_refused(count: int, fraction: float):
    with refused(DataError, key="validation.fraction", value=fraction):
        hold_out(numbered(count), fraction, seed=0)


def test_at_most_so_many_are_drawn_all_different_and_always_the_same():
    rows = numbered(30)
    few = numbers(fixed_sample(rows, 10))
    assert (len(few), len(set(few))) == (10, 10)
    assert few != list(range(10))
    assert numbers(fixed_sample(rows, 10)) == few
    assert sorted(numbers(fixed_sample(rows, 100))) == list(range(30))


def example(prompt: int, length: int) -> Sample:
    return make_sample(np.zeros(length, int).tolist(), prompt)


def test_examples_that_are_cut_are_counted_and_said_once(caplog: pytest.LogCaptureFixture):
    cuts = TruncationMonitor(seq_len=8)
    with caplog.at_level(logging.WARNING):
        assert cuts.count([example(4, 8)]) == {"data/truncated": 0, "data/not_learned": 0}
        assert not caplog.messages
        # 9 tokens of which the last is cut; 12 of which 8 are prompt; 10 of which one learned token is left
        counts = cuts.count([example(4, 9), example(8, 12), example(7, 10), example(2, 3)])
        assert counts == {"data/truncated": 3, "data/not_learned": 1}
        cuts.count([example(4, 9)])
    assert len(caplog.messages) == 1
    assert "3 of 4 examples" in caplog.messages[0]


def test_examples_that_are_all_cut_to_nothing_are_an_error_with_the_length_that_they_need():
    cuts = TruncationMonitor(seq_len=8)
    cuts.count([example(8, 12)] * (TruncationMonitor.MIN_EXAMPLES - 1))
    with pytest.raises(DataError) as refusal:
        cuts.count([example(9, 20)])
    assert (refusal.value.key, refusal.value.value) == ("seq_len", 8)
    assert "20" in str(refusal.value.fix)
    few = TruncationMonitor(seq_len=8)
    few.count([example(8, 12)])
    with pytest.raises(DataError):
        few.refuse_if_nothing_is_learned()
    few.count([example(2, 3)])
    few.refuse_if_nothing_is_learned()
