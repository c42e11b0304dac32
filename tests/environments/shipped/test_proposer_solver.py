"""A proposer and its solvers: what each is asked, what each earns, and the credit that follows."""

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.algorithms.hierarchical_grpo import HierarchicalGrpo
from headrace.environments.base import EpisodeError, Reply
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.script import as_reply, demonstrate, play
from headrace.environments.shipped.proposer_solver import ProposerSolver
from headrace.orchestrator.processing import TrainProcessing
from headrace.rollout.checks import check_rollout
from headrace.rollout.types import Group, Rollout, Task, Turn
from tests.environments.shipped.games import HOSTILE, first_tasks, heard
from tests.refusals import refused

TERSE = ProposerSolver(terse=True)
WORDY = ProposerSolver()
SEVEN = Task("game", {"number": 7, "operator": "+", "other": 35}, "seven")


def sampled(text: str) -> Reply:
    """As if an engine had written it, in three tokens."""
    reply = as_reply(text)
    return Reply(reply.message, Turn([0], [1, 2, 3], [-1.0] * 3, [0] * 3, 1.0))


async def play_out(environment: ProposerSolver, *replies: str, task: Task = SEVEN) -> list[Rollout]:
    said = iter(replies)
    rollouts, script = await play(environment, task, lambda messages: sampled(next(said)))
    assert len(script.calls) == len(replies)
    return rollouts


def rewards(rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [rollout.rewards for rollout in rollouts]


async def test_an_episode_is_one_proposer_and_its_solvers():
    proposer, *solvers = await play_out(TERSE, "7+35", "42", "42", "41", " 42 ")
    assert proposer.agent == "proposer"
    assert heard(proposer) == ["7+"]
    assert [solver.agent for solver in solvers] == ["solver"] * 4
    assert {tuple(heard(solver)) for solver in solvers} == {("7+35=",)}
    assert rewards(solvers) == [{"correct": 1}, {"correct": 1}, {"correct": 0}, {"correct": 1}]
    assert proposer.rewards == {"learnable": 0.5, "valid": 0.1}  # 1 - |2 * 3/4 - 1|
    assert proposer.metrics == {"invalid": 0, "solved": 0.75}


@pytest.mark.parametrize(("right", "worth"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 0.5), (4, 0.0)])
async def test_a_problem_is_worth_most_where_half_of_the_solvers_are_right(right: int, worth: float):
    proposer, *_ = await play_out(TERSE, "7+35", *["42"] * right, *["0"] * (4 - right))
    assert proposer.rewards == {"learnable": worth, "valid": 0.1}


async def test_words_for_larger_models():
    answers = ["<answer>-28</answer>", "It is <answer> -28 </answer>.", "-28", "<answer>28</answer>"]
    task = Task("game", {"number": 7, "operator": "-", "other": 1})
    proposer, *solvers = await play_out(WORDY, "How about <problem>7 - 35</problem>?", *answers, task=task)
    assert "at most 2 digits with - between them, one of which is 7." in heard(proposer)[0]
    assert heard(solvers[0]) == ["What is 7 - 35? Write the number between <answer> and </answer>."]
    assert [solver.rewards["correct"] for solver in solvers] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "problem",
    [
        "7-35",
        "8+35",
        "7+350",
        "07+35",
        "7+035",
        "7+35=",
        "7+35+1",
        "7 +  35",
        "7",
        "",
        "35 plus 7",
        "-7+35",
        "\u0667+35",
    ],
)
async def test_an_invalid_problem_reaches_no_solver(problem: str):
    (proposer,) = await play_out(TERSE, problem)
    assert proposer.rewards == {"learnable": 0, "valid": 0}
    assert proposer.metrics == {"invalid": 1}


@pytest.mark.parametrize("problem", ["7+35", "35+7", "7 + 35", " 0+7\n", "7+7"])
async def test_the_number_may_be_on_either_side(problem: str):
    proposer, *solvers = await play_out(TERSE, problem, *"0000")
    assert (proposer.rewards["valid"], len(solvers)) == (0.1, 4)


@pytest.mark.parametrize("reply", HOSTILE)
@pytest.mark.parametrize("environment", [TERSE, WORDY])
async def test_hostile_replies_earn_nothing(environment: ProposerSolver, reply: str):
    (proposer,) = await play_out(environment, reply)
    assert sum(proposer.rewards.values()) == 0
    _, *solvers = await play_out(environment, str(environment.gold(SEVEN, [{"content": ""}])), *[reply] * 4)
    assert rewards(solvers) == [{"correct": 0}] * 4


async def test_a_solver_that_fails_costs_its_episode_and_leaves_none_waiting():
    def answer(messages):
        if messages[0]["content"].endswith("="):
            raise EpisodeError("engine", "gone")
        return "7+35"

    with pytest.raises(EpisodeError, match="gone"):
        await play(TERSE, SEVEN, answer)


@pytest.mark.parametrize("environment", [TERSE, WORDY])
async def test_gold_proposes_what_was_asked_for_and_solves_it(environment: ProposerSolver):
    for task in first_tasks(environment):
        rollouts, _ = await play(environment, task, lambda messages, task=task: environment.gold(task, messages))
        assert rewards(rollouts) == [{"learnable": 0, "valid": 0.1}, *[{"correct": 1}] * 4]


def test_demonstrations_show_both_roles_and_problems_of_every_size():
    shown = demonstrate(ProposerSolver(terse=True, demonstrate_mistakes=0.5), seed=0)
    talks = [next(shown).messages for _ in range(2000)]
    solved = [talk for talk in talks if talk[0]["content"].endswith("=")]
    proposed = [talk for talk in talks if not talk[0]["content"].endswith("=")]
    assert len(solved) == 4 * len(proposed)
    lengths = {len(talk[1]["content"]) for talk in proposed}
    assert lengths == {3, 4, 5}  # 1+1, 1+22 or 11+2, 11+22
    wrong = [talk for talk in solved if str(eval(talk[0]["content"][:-1])) != talk[1]["content"]]
    assert len(wrong) / len(solved) == pytest.approx(0.5, abs=0.06)


def test_each_task_has_a_number_and_an_operator_of_its_own():
    tasks = ProposerSolver(num_tasks=500).tasks()
    assert len({(task["number"], task["operator"]) for task in tasks}) == len(tasks) > 150  # of 200 there can be
    held_out = {(task["number"], task["operator"]) for task in ProposerSolver("eval").tasks()}
    assert held_out and held_out.isdisjoint((task["number"], task["operator"]) for task in tasks)


async def test_solvers_are_compared_within_their_episode_and_proposers_across_the_group():
    """Three episodes of one group through the levels of processing, worked by hand."""
    played = [
        # learnable 1, .5, and a problem that was not asked for
        await play_out(TERSE, "7+1", "8", "8", "0", "0"),
        await play_out(TERSE, "7+2", "9", "9", "9", "0"),
        await play_out(TERSE, "1+1"),
    ]
    algorithm = HierarchicalGrpo(["solver"])
    processing = TrainProcessing({"game": algorithm}, {"game": TERSE}, [], [], seq_len=100)
    group = Group("g", SEVEN, 3, 0, draw_id=0)
    rollouts = []
    for episode, returned in enumerate(played):
        for rollout in returned:
            rollout.env, rollout.group_id, rollout.episode = "game", "g", episode
            check_rollout(rollout, scored_later=False)
            await processing.process_rollout(rollout, SEVEN)
            rollouts.append(rollout)
    scored = await processing.process_group(group, rollouts)
    assert [rollout.credited for rollout in scored.rollouts] == [11] * 11
    credit = [rollout.mean_advantage for rollout in scored.rollouts]
    mean = (1.1 + 0.6 + 0.0) / 3
    expected = [1.1 - mean, 0.5, 0.5, -0.5, -0.5, 0.6 - mean, 0.25, 0.25, 0.25, -0.75, -mean]
    np.testing.assert_allclose(credit, expected, atol=1e-6)
    assert algorithm.tally.take() == {"without_peers": 0}


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"split": "dev"}, "split"),
        ({"num_solvers": 0}, "num_solvers"),
        ({"max_digits": 10}, "max_digits"),
        ({"operators": "/"}, "operators"),
        ({"terse": "yes"}, "terse"),
    ],
)
def test_wrong_args_are_refused_by_name(args, key):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("proposer-solver", args)
