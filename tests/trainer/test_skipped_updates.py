"""When updates that change nothing end a run, and what is said then."""

import math

from headrace.trainer.skipped_updates import SkippedUpdates


def test_only_updates_that_are_skipped_one_after_another_count():
    skipped = SkippedUpdates(most=2)
    norms = [math.nan, 0.5, math.inf, 0.0, math.nan]
    assert [skipped.look(step, norm, 1.0) for step, norm in enumerate(norms, 1)] == [None] * 5
    assert skipped.in_a_row == 1
    assert skipped.look(6, math.nan, 1.0) is not None


def test_the_end_is_told_with_steps_norms_losses_and_what_was_before():
    skipped = SkippedUpdates(most=3)
    skipped.look(7, 2.25, 0.125)
    for step, (norm, loss) in enumerate([(math.inf, 3.5), (math.inf, 9.0)], 8):
        assert skipped.look(step, norm, loss) is None
    story = skipped.look(10, math.nan, math.nan)
    assert story is not None
    assert "the gradients of steps 8 to 10 were not finite" in story
    assert "max_skipped_updates = 3" in story
    assert "norms were inf, nan, the losses 3.5, 9, nan; at step 7" in story
    assert "they were 2.25 and 0.125" in story


def test_where_nothing_was_ever_learned_it_is_said_and_many_numbers_are_cut_short():
    skipped = SkippedUpdates(most=6)
    stories = [skipped.look(step, math.nan, float(step)) for step in range(1, 7)]
    assert stories[:5] == [None] * 5
    assert "the losses 1, 2, ..., 6; nothing was learned before" in str(stories[5])
