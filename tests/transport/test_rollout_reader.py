"""Rollouts read back from a step's file: the same samples, and turns that merge to them."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.errors import BadInput
from headrace.rollout.merge import merge_turns, observed_roles
from headrace.rollout.types import Rollout, RolloutError, Sample, Turn
from headrace.transport.rollout_files import RolloutFiles, write_eval_rollouts, write_rollouts
from headrace.transport.rollout_tables import SavedRollout
from headrace.transport.run_dir import RolloutKind
from tests.refusals import refused
from tests.rollout.strategies import FIXED, STREAM_NAMES, assert_same, floats32

FEW = settings(FIXED, max_examples=15)
"""Every example writes a file."""


def turn(prompt: list[int], completion: list[int]) -> Turn:
    return Turn(prompt, completion, [-token / 8 for token in completion], [0] * len(completion), 1.0)


def saved(directory: Path, *rollouts: Rollout, dropped: tuple[tuple[Rollout, str], ...] = ()) -> list[SavedRollout]:
    write_rollouts(directory, 1, rollouts, dropped)
    return RolloutFiles(directory).read(1)


@st.composite
def turns(draw: Any, empty: bool) -> list[Turn]:
    """Up to six turns, each new or a continuation of an earlier one; `empty`: some have nothing new to read."""
    few = st.lists(st.integers(0, 3), min_size=0 if empty else 1, max_size=3)  # few different ones: prefixes collide
    made: list[Turn] = []
    for _ in range(draw(st.integers(1, 6))):
        parent = draw(st.integers(-1, 3))
        start = [*made[parent].prompt_ids, *made[parent].completion_ids] if 0 <= parent < len(made) else []
        prompt, completion = start + draw(few), draw(few)
        # By chance alone a turn may go on from another with nothing new to read.
        assume(empty or all(prompt != [*other.prompt_ids, *other.completion_ids] for other in made))
        roles = draw(st.one_of(st.none(), st.just(np.arange(len(prompt)) % 5)))
        made.append(
            Turn(
                prompt,
                completion,
                draw(st.lists(floats32(), min_size=len(completion), max_size=len(completion))),
                [len(made)] * len(completion),
                draw(st.sampled_from([1.0, 0.5])),
                draw(st.sampled_from(["stop", "length"])),
                draw(st.one_of(st.none(), st.just(np.full(len(completion), -0.25)))),
                roles,
            )
        )
    return made


def assert_same_samples(before: Rollout, after: Rollout) -> None:
    """Their observations' authors included."""
    for mine, other in zip(before.samples, after.samples, strict=True):
        assert_same(mine, other)
        np.testing.assert_array_equal(observed_roles(mine, before.turns), observed_roles(other, after.turns))


@st.composite
def rollouts(draw: Any, empty: bool = False, seq_len: int = 1000) -> Rollout:
    made = draw(turns(empty))
    samples = [sample.truncated(seq_len) for sample in merge_turns(made)]
    for sample in samples:
        for name in draw(st.sets(st.sampled_from(STREAM_NAMES))):
            sample.set_stream(name, draw(st.lists(floats32(), min_size=len(sample), max_size=len(sample))))
    return Rollout(env="env", group_id="7-1", draw_id=7, reward=0.5, turns=made, samples=samples)


def bare(sample: Sample) -> Sample:
    """As merging makes it, without credit."""
    streams = {name: values for name, values in sample.streams.items() if name == "truncated_logprobs"}
    return Sample(
        sample.token_ids,
        sample.mask,
        sample.logprobs,
        sample.versions,
        sample.prompt_length,
        sample.temperature,
        sample.obs_spans,
        streams,
    )


@FEW
@given(st.lists(rollouts(), min_size=1, max_size=3))
def test_what_was_played_reads_back_as_the_same_samples_and_the_same_turns(played: list[Rollout]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        found = [entry.rollout for entry in saved(Path(directory), *played)]
    for before, after in zip(played, found, strict=True):
        assert_same_samples(before, after)
        for merged, other in zip(merge_turns(after.turns), before.samples, strict=True):
            assert_same(merged, bare(other))
        for one, two in zip(before.turns, after.turns, strict=True):
            for name in ("prompt_ids", "completion_ids", "logprobs", "versions"):
                np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
            assert (one.temperature, one.finish_reason) == (two.temperature, two.finish_reason)


@FEW
@given(rollouts(empty=True, seq_len=6))
def test_turns_that_added_nothing_or_were_cut_off_are_still_counted(played: Rollout) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (found,) = saved(Path(directory), played)
    assert_same_samples(played, found.rollout)
    assert len(found.rollout.turns) == len(played.turns)
    assert found.rollout.completion_tokens == sum(int(sample.mask.sum()) for sample in played.samples)


def test_two_turns_with_nothing_between_them_are_one_and_an_empty_one(tmp_path: Path) -> None:
    played = [turn([1], [2, 3]), turn([1, 2, 3], [4]), turn([1, 2, 3, 4, 5], [6])]
    (found,) = saved(tmp_path, Rollout(turns=played, samples=merge_turns(played)))
    turns = [(t.prompt_ids.tolist(), t.completion_ids.tolist()) for t in found.rollout.turns]
    assert turns == [([1], [2, 3, 4]), ([1, 2, 3, 4], []), ([1, 2, 3, 4, 5], [6])]
    (merged,) = merge_turns(found.rollout.turns)
    assert_same(merged, found.rollout.samples[0])


def test_latents_come_back_as_rows_of_their_sample_and_of_its_turn(tmp_path: Path) -> None:
    rows = np.arange(6, dtype=np.float16).reshape(2, 3) / 7
    played = [Turn([1], [2, 3], [-0.5] * 2, [0] * 2, 1.0, latents=rows)]
    (found,) = saved(tmp_path, Rollout(turns=played, samples=merge_turns(played)))
    latents = found.rollout.samples[0].streams["latents"]
    assert latents.dtype == np.float16
    np.testing.assert_array_equal(latents[1:], rows)
    np.testing.assert_array_equal(found.rollout.turns[0].latents, rows)


def test_latents_take_no_more_of_a_file_than_float16(tmp_path: Path) -> None:
    rows = (np.random.default_rng(0).normal(size=(400, 256)) * 0.1).astype(np.float16)
    played = [Turn([1], [2] * 400, [-0.5] * 400, [0] * 400, 1.0, latents=rows)]
    saved(tmp_path, Rollout(turns=played, samples=merge_turns(played)))
    (file,) = tmp_path.glob("**/*.parquet")
    assert file.stat().st_size < rows.nbytes + 20_000  # the other columns, and the file's footer


def test_a_rollout_keeps_what_its_environment_said_of_it(tmp_path: Path) -> None:
    played = [turn([1], [2])]
    scored = Rollout(
        env="copy",
        task_key="t",
        group_id="3-1",
        draw_id=3,
        episode=5,
        agent="critic",
        trainable=False,
        reward=0.75,
        rewards={"right": 1.0, "short": -0.25},
        metrics={"length": 2.0},
        messages=[{"role": "user", "content": "héllo"}],
        turns=played,
        samples=merge_turns(played),
        truncated=True,
        stop_reason="length",
        timings={"episode": 1.5},
    )
    failed = Rollout(env="copy", turns=played, error=RolloutError("timeout", "after 60 s"))
    one, two = saved(tmp_path, scored, dropped=((failed, "timeout"),))
    for name in scored.__struct_fields__:
        if name not in ("turns", "samples"):
            assert getattr(one.rollout, name) == getattr(scored, name)
    assert (one.drop_reason, two.drop_reason) == ("", "timeout")
    assert two.rollout.error == failed.error
    assert math.isnan(two.rollout.reward)
    assert two.rollout.turns == []  # it was never merged


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = RolloutKind.TRAIN.path(tmp_path, 1)
    write_rollouts(tmp_path, 1, [Rollout()], [])
    pq.write_table(pq.read_table(path).drop_columns(["finish_reasons"]), path)
    with refused(BadInput, file=path):
        RolloutFiles(tmp_path).read(1)


def test_the_steps_on_disk_are_listed_in_order_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    for step in (2, 10, 1):
        write_rollouts(tmp_path, step, [Rollout(group_id=f"{step}-0")], [])
    files = RolloutFiles(tmp_path)
    assert files.steps() == [1, 2, 10]
    assert files.columns(10, ["group_id", "drop_reason"]) == [{"group_id": "10-0", "drop_reason": None}]
    with pytest.raises(BadInput) as gone:
        files.read(3)
    assert gone.value.file == tmp_path / "step-00000003.parquet" and "orchestrator.keep_rollouts" in gone.value.fact
    (tmp_path / "step-00000003.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(BadInput) as damaged:
        files.read(3)
    assert damaged.value.file == tmp_path / "step-00000003.parquet"


def test_an_evaluation_reads_back_with_samples_and_beside_training(tmp_path: Path) -> None:
    turns = [turn([1, 2], [3]), turn([1, 2, 3, 4], [5])]
    played = Rollout(env="e", task_key="t", episode=0, reward=0.5, rewards={"a": 0.5}, turns=turns)
    failed = Rollout(env="e", task_key="t", episode=1, turns=turns, error=RolloutError("timeout", "after 60 s"))
    write_eval_rollouts(RolloutKind.EVAL.path(tmp_path, 7), 7, [failed, played])
    write_rollouts(tmp_path, 1, [Rollout()], [])
    files = RolloutFiles(tmp_path, RolloutKind.EVAL)
    assert (files.steps(), RolloutFiles(tmp_path).steps()) == ([7], [1])
    first, second = (saved.rollout for saved in files.read(7))
    (sample,) = first.samples
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5] and len(first.turns) == 2
    assert (first.reward, first.rewards, first.stop_reason) == (0.5, {"a": 0.5}, "stop")
    assert second.error == failed.error and not second.samples
    assert not played.samples, "what is merged for the file does not stay in memory"


def keys(directory: Path, step: int) -> list[tuple[str, str, int]]:
    rows = RolloutFiles(directory, RolloutKind.EVAL).columns(step, ["env", "task_key", "episode", "reward"])
    return [(row["env"], row["task_key"], row["reward"]) for row in rows]


def test_environments_of_one_version_share_a_file_and_replace_their_own_rows(tmp_path: Path) -> None:
    path = RolloutKind.EVAL.path(tmp_path, 4)

    def evaluate(env: str, *rewards: float, add: bool = False) -> None:
        rollouts = [Rollout(env=env, task_key=f"t{n}", episode=0, reward=reward) for n, reward in enumerate(rewards)]
        write_eval_rollouts(path, 4, rollouts, add=add)

    evaluate("a", 0.0, 0.0)
    evaluate("b", 1.0)
    assert keys(tmp_path, 4) == [("a", "t0", 0.0), ("a", "t1", 0.0), ("b", "t0", 1.0)]
    evaluate("a", 0.5)  # again after a resume, with fewer tasks
    assert keys(tmp_path, 4) == [("b", "t0", 1.0), ("a", "t0", 0.5)]
    write_eval_rollouts(path, 4, [Rollout(env="b", task_key="t9", episode=0, reward=2.0)], add=True)
    evaluate("b", 3.0, add=True)
    assert keys(tmp_path, 4) == [("a", "t0", 0.5), ("b", "t9", 2.0), ("b", "t0", 3.0)]


def test_a_damaged_file_of_an_evaluation_is_replaced(tmp_path: Path) -> None:
    path = RolloutKind.EVAL.path(tmp_path, 4)
    path.write_bytes(b"PAR1 and then nothing")
    write_eval_rollouts(path, 4, [Rollout(env="a", task_key="t", reward=1.0)])
    assert keys(tmp_path, 4) == [("a", "t", 1.0)]
    pq.write_table(pq.read_table(path).drop_columns(["seconds"]), path)  # as another version wrote it
    write_eval_rollouts(path, 4, [Rollout(env="b", task_key="t", reward=0.0)])
    assert keys(tmp_path, 4) == [("b", "t", 0.0)]


def test_the_two_writers_do_not_remove_what_the_other_is_writing(tmp_path: Path) -> None:
    writing = tmp_path / "eval-step-00000004.tmp"
    writing.write_bytes(b"half")
    write_rollouts(tmp_path, 1, [Rollout()], [])
    assert writing.exists()
    write_eval_rollouts(RolloutKind.EVAL.path(tmp_path, 5), 5, [Rollout()])
    assert not writing.exists()
