"""pass@k against numbers worked by hand, and against all choices."""

import itertools

import pytest

from headrace.orchestrator.batch_metrics import pass_at_k, pass_rates


@pytest.mark.parametrize(
    ("samples", "correct", "k", "expected"),
    [
        (4, 1, 2, 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - C(3, 3) / C(5, 3) = 1 - 1/10
        (3, 0, 2, 0.0),
        (3, 2, 2, 1.0),  # two wrong ones cannot be chosen
        (8, 3, 1, 0.375),  # pass@1 is the share that is right
    ],
)
def test_pass_at_k_by_hand(samples: int, correct: int, k: int, expected: float):
    assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_right_one():
    for samples, k in itertools.product(range(1, 7), range(1, 7)):
        for correct in range(samples + 1) if k <= samples else ():
            choices = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_more_than_there_are_samples_is_refused():
    with pytest.raises(ValueError):
        pass_at_k(2, 1, 3)


def test_pass_is_reported_at_powers_of_two_and_at_all_samples():
    assert [list(pass_rates([[1.0] * samples], samples, None)) for samples in (1, 2, 4, 6)] == [
        [1],
        [1, 2],
        [1, 2, 4],
        [1, 2, 4, 6],
    ]
