"""Which saved rollouts were credited together."""

from collections import Counter
from pathlib import Path

from headrace.rollout.types import Rollout, RolloutError
from headrace.tools.rescore.credit import CreditedGroups
from headrace.transport.rollout_files import RolloutFiles, write_rollouts
from headrace.transport.run_dir import RolloutKind

Row = tuple[int, str]
"""Draw and drop reason; none: it was shipped."""


def save(
    directory: Path,
    step: int,
    *rows: Row,
    env: str = "env",
    error: str = "",
    trainable: bool = True,
    credited: int | None = None,
) -> None:
    """As many as are saved of a draw were credited together, unless there is another number."""
    sizes = Counter(draw for draw, _ in rows)
    made = [
        (
            Rollout(
                env=env,
                group_id=f"{draw}-0",
                draw_id=draw,
                credited=sizes[draw] if credited is None else credited,
                reward=0.0,
                trainable=trainable,
                error=RolloutError(error) if error else None,
            ),
            reason,
        )
        for draw, reason in rows
    ]
    kept = [rollout for rollout, reason in made if not reason]
    write_rollouts(directory, step, kept, [(rollout, reason) for rollout, reason in made if reason])


def groups(directory: Path, *steps: int, env: str | None = None) -> tuple[dict[int, list[list[int]]], dict[str, int]]:
    """By step the groups as lists of draws, and how many were left out why."""
    found = CreditedGroups(RolloutFiles(directory), steps, env)
    by_step = {step: [[saved.rollout.draw_id for saved in group] for group in found.of_step(step)] for step in steps}
    return by_step, dict(found.left_out)


def test_a_step_has_its_groups_in_the_order_of_their_draws_filtered_members_included(tmp_path: Path):
    save(tmp_path, 1, (7, ""), (3, ""), (7, "gibberish"), (3, ""), (5, "zero_advantage"), (5, "zero_advantage"))
    assert groups(tmp_path, 1) == ({1: [[3, 3], [5, 5], [7, 7]]}, {})


def test_members_are_in_the_order_of_their_episodes_whether_they_were_dropped_or_not(tmp_path: Path):
    made = [
        Rollout(env="env", group_id="3-0", draw_id=3, credited=4, reward=0.0, episode=episode, agent=agent)
        for episode in (0, 1)
        for agent in "ab"
    ]
    write_rollouts(tmp_path, 1, [made[1], made[2]], [(made[0], "gibberish"), (made[3], "gibberish")])
    (group,) = CreditedGroups(RolloutFiles(tmp_path), [1]).of_step(1)
    assert [(saved.rollout.episode, saved.rollout.agent) for saved in group] == [(0, "b"), (0, "a"), (1, "a"), (1, "b")]


def test_a_group_in_two_files_counts_once_it_is_whole(tmp_path: Path):
    save(tmp_path, 1, (3, "gibberish"), credited=3)
    save(tmp_path, 2, (3, ""), (3, ""), credited=3)
    save(tmp_path, 3, (4, ""))
    assert groups(tmp_path, 1, 2, 3) == ({1: [], 2: [[3, 3, 3]], 3: [[4]]}, {})


def test_a_group_of_which_a_part_is_in_another_step_is_left_out(tmp_path: Path):
    save(tmp_path, 1, (3, "gibberish"), credited=3)
    save(tmp_path, 2, (3, ""), (3, ""), (4, ""), (4, ""), (4, ""), credited=3)
    assert groups(tmp_path, 2) == ({2: [[4, 4, 4]]}, {"incomplete": 3})


def test_a_group_of_which_a_part_was_deleted_is_left_out(tmp_path: Path):
    save(tmp_path, 1, (3, "gibberish"), (3, "gibberish"), credited=4)
    save(tmp_path, 2, (3, ""), (3, ""), credited=4)
    RolloutKind.TRAIN.path(tmp_path, 1).unlink()
    assert groups(tmp_path, 2) == ({2: []}, {"incomplete": 2})


def test_what_a_killed_run_had_saved_of_a_group_is_no_group(tmp_path: Path):
    save(tmp_path, 1, (3, "gibberish"), credited=4)
    save(tmp_path, 2, *[(4, "")] * 4)
    assert groups(tmp_path, 1, 2) == ({1: [], 2: [[4] * 4]}, {"incomplete": 1})


def test_groups_that_were_given_up_are_left_out_whole(tmp_path: Path):
    save(tmp_path, 1, (3, "gibberish"), (3, "off_policy"), (4, "max_steps"), (5, ""))
    assert groups(tmp_path, 1) == ({1: [[5]]}, {"off_policy": 2, "max_steps": 1})


def test_what_failed_or_is_not_trainable_was_never_credited(tmp_path: Path):
    save(tmp_path, 1, (3, "timeout"), error="timeout")
    save(tmp_path, 2, (4, "not_trainable"), trainable=False)
    save(tmp_path, 3, (4, ""))
    assert groups(tmp_path, 1, 2, 3) == ({1: [], 2: [], 3: [[4]]}, {"timeout": 1, "not_trainable": 1})


def test_another_environment_is_none_of_its_business(tmp_path: Path):
    save(tmp_path, 1, (3, ""), env="one")
    save(tmp_path, 2, (4, ""), env="two")
    assert groups(tmp_path, 1, 2, env="two") == ({1: [], 2: [[4]]}, {})


def test_a_group_whose_first_rollouts_did_not_fit_into_a_file_is_left_out(tmp_path: Path):
    save(tmp_path, 1, (3, "zero_advantage"), (4, "zero_advantage"), (4, "zero_advantage"), credited=2)
    assert groups(tmp_path, 1) == ({1: [[4, 4]]}, {"incomplete": 1})
