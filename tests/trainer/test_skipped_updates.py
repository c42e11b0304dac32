"""When updates that change nothing end a run, and what is said then."""

import math

from headrace.trainer.learner import SkippedUpdates


def test_only_updates_that_are_skipped_one_after_another_count():
    skipped = SkippedUpdates(limit=2)
    norms = [math.nan, 0.5, math.inf, 0.0, math.nan]
    assert [skipped.record(step, norm, 1.0) for step, norm in enumerate(norms, 1)] == [None] * 5
    assert skipped.in_a_row == 1
    assert skipped.record(6, math.nan, 1.0) is not None


def test_the_end_is_reported_with_steps_norms_losses_and_what_was_before():
    skipped = SkippedUpdates(limit=3)
    skipped.record(7, 2.25, 0.125)
    for step, (norm, loss) in enumerate([(math.inf, 3.5), (math.inf, 9.0)], 8):
        assert skipped.record(step, norm, loss) is None
    problem = skipped.record(10, math.nan, math.nan)
    assert problem is not None
    named = ("8 to 10", "max_skipped_updates = 3", "inf, nan", "3.5, 9, nan", "step 7", "2.25", "0.125")
    assert [words for words in named if words not in problem] == []


def test_where_nothing_was_ever_learned_it_is_said_and_many_numbers_are_cut_short():
    skipped = SkippedUpdates(limit=6)
    problems = [skipped.record(step, math.nan, float(step)) for step in range(1, 7)]
    assert problems[:5] == [None] * 5
    assert "1, 2, ..., 6" in str(problems[5])
