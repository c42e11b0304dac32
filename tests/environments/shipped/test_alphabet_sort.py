"""Sort names, and go on sorting as more of them come."""

import itertools

import pytest

from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.script import as_reply
from headrace.environments.shipped.alphabet_sort import AlphabetSort
from headrace.rollout.types import Task
from tests.environments.shipped.games import HOSTILE, first_tasks, heard, play_gold, play_mistakes, play_replies, total
from tests.refusals import refused

LETTERS = AlphabetSort(items="letters", terse=True)
DAC_B = Task("game", {"batches": [["d", "a", "c"], ["b"]], "by": "first"})
NAMES = Task("game", {"batches": [["Ruth Abbott", "Ada Young"], ["Karl Moss"]], "by": "first"})


async def test_terse_letters_are_asked_and_answered_without_a_word():
    rollout = await play_gold(LETTERS, DAC_B)
    assert [message["content"] for message in rollout.messages] == ["d a c", "a c d", "b", "a b c d"]
    assert (rollout.rewards, rollout.metrics) == ({"similarity": 1.0}, {"exact": 1.0})
    assert rollout.stop_reason == "done"


async def test_the_reward_is_the_mean_similarity_of_the_turns():
    rollout = await play_replies(LETTERS, DAC_B, "d a c", "a b c d")
    assert rollout.rewards == {"similarity": pytest.approx((2 * 2 / 6 + 1) / 2)}  # "a c" is in order, then all
    assert rollout.metrics == {"exact": 0.5}


async def test_the_similarity_of_each_turn_is_raised_to_the_power():
    squared = AlphabetSort(items="letters", terse=True, similarity_power=2)
    rollout = await play_replies(squared, DAC_B, "d a c", "a b c d")
    assert rollout.rewards == {"similarity": pytest.approx(((2 / 3) ** 2 + 1) / 2)}


async def test_every_turn_asks_for_the_whole_list():
    rollout = await play_replies(LETTERS, DAC_B, "a c d", "b")
    assert rollout.rewards == {"similarity": pytest.approx((1 + 2 * 1 / 5) / 2)}


async def test_names_are_asked_for_between_tags_one_to_a_line():
    rollout = await play_gold(AlphabetSort(), NAMES)
    first, second = heard(rollout)
    assert first.startswith("Sort these names alphabetically by first name:\nRuth Abbott\nAda Young\n")
    assert second == "Add these names and sort the whole list again:\nKarl Moss"
    assert rollout.messages[-1]["content"] == "<sorted>\nAda Young\nKarl Moss\nRuth Abbott\n</sorted>"
    assert rollout.rewards == {"similarity": 1.0}


async def test_thoughts_before_the_tags_cost_nothing_and_lists_without_tags_earn_nothing():
    thinking = "A comes first.\n<sorted>\n Ada Young\n\nRuth Abbott </sorted> Done."
    everything = "<sorted>Ada Young\nKarl Moss\nRuth Abbott</sorted>"
    assert (await play_replies(AlphabetSort(), NAMES, thinking, everything)).rewards == {"similarity": 1.0}
    plain = "Ada Young\nRuth Abbott", "Ada Young\nKarl Moss\nRuth Abbott"
    assert (await play_replies(AlphabetSort(), NAMES, *plain)).rewards == {"similarity": 0.0}


async def test_two_lists_in_one_reply_are_none():
    hedged = "<sorted>Ada Young\nRuth Abbott</sorted><sorted>Ruth Abbott\nAda Young</sorted>"
    assert total(await play_replies(AlphabetSort(), NAMES, hedged)) == 0


async def test_names_sorted_by_last_name():
    task = Task("game", {**NAMES.data, "by": "last"})
    rollout = await play_gold(AlphabetSort(sort_by="last"), task)
    assert "by last name" in heard(rollout)[0]
    assert rollout.messages[-1]["content"] == "<sorted>\nRuth Abbott\nKarl Moss\nAda Young\n</sorted>"


def test_either_name_may_be_asked_for():
    asked = {task["by"] for task in AlphabetSort(sort_by="either", num_tasks=50).tasks()}
    assert asked == {"first", "last"}


@pytest.mark.parametrize("args", [{"num_tasks": 300}, {"items": "letters", "terse": True, "num_tasks": 300}])
def test_tasks_have_the_asked_sizes_distinct_items_and_a_first_batch_out_of_order(args):
    environment = AlphabetSort(min_turns=2, max_turns=4, min_names_per_turn=1, max_names_per_turn=3, **args)
    turns, sizes = set(), set()
    for task in environment.tasks():
        batches = task["batches"]
        items = list(itertools.chain(*batches))
        assert len(set(items)) == len(items)
        assert batches[0] != sorted(batches[0])
        turns.add(len(batches))
        sizes.update(map(len, batches[1:]))
    assert (turns, sizes) == ({2, 3, 4}, {1, 2, 3})


def test_names_of_a_task_differ_in_both_parts():
    for task in AlphabetSort(num_tasks=100, max_names_per_turn=20).tasks():
        firsts, lasts = zip(*(name.split() for batch in task["batches"] for name in batch), strict=True)
        assert len(set(firsts)) == len(firsts)
        assert len(set(lasts)) == len(lasts)


def test_no_task_is_in_both_splits_whatever_the_seeds():
    small = {"items": "letters", "max_turns": 1, "max_names_per_turn": 2, "num_tasks": 400}
    train = [task["batches"] for task in AlphabetSort("train", seed=1, **small).tasks()]
    evaluation = [task["batches"] for task in AlphabetSort("eval", seed=2, **small).tasks()]
    assert len(train) > 200
    assert len(evaluation) > 20
    assert not [task for task in evaluation if task in train]


def test_tasks_depend_on_the_seed_alone():
    assert AlphabetSort(seed=3).tasks() == AlphabetSort(seed=3).tasks()
    assert AlphabetSort(seed=3).tasks() != AlphabetSort(seed=4).tasks()


@pytest.mark.parametrize("environment", [AlphabetSort(), LETTERS, AlphabetSort(sort_by="either")])
async def test_gold_earns_everything_and_mistakes_less(environment):
    for task in first_tasks(environment):
        assert total(await play_gold(environment, task)) == 1
        assert total(await play_mistakes(environment, task)) < 1


def test_the_mistake_is_to_append_what_is_new():
    turns = [{"role": "user", "content": "d a c"}, {"role": "assistant", "content": "a c d"}]
    assert LETTERS.mistake(DAC_B, turns, None) == "a c d b"
    in_order = Task("game", {"batches": [["c", "a"], ["d", "e"]], "by": "first"})
    assert LETTERS.mistake(in_order, turns, None) == "a c e d"


@pytest.mark.parametrize("reply", HOSTILE)
@pytest.mark.parametrize("environment", [AlphabetSort(), LETTERS])
async def test_hostile_replies_earn_almost_nothing(environment, reply):
    (task,) = first_tasks(environment, 1)
    assert total(await play_replies(environment, task, reply)) < 0.3


async def test_of_a_long_answer_only_a_few_times_the_wanted_items_are_read():
    late = await play_replies(LETTERS, DAC_B, "x " * 8 * 3 + "a c d", "x " * 8 * 4 + "a b c d")
    assert late.rewards == {"similarity": 0.0}
    early = await play_replies(LETTERS, DAC_B, "a c d " + "x " * 4000, "a b c d " + "x " * 4000)
    assert early.rewards == {"similarity": pytest.approx((2 * 3 / (3 + 24) + 2 * 4 / (4 + 32)) / 2)}


async def test_a_turn_that_is_not_reached_counts_as_nothing():
    class OneTurn:
        async def chat(self, messages, tools=(), max_tokens=None):
            reply = as_reply("a c d")
            reply.turn.finish_reason = "length"
            return reply

    (rollout,) = await LETTERS.run(DAC_B, OneTurn())
    assert rollout.rewards == {"similarity": 0.5}
    assert rollout.truncated


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"split": "test"}, "split"),
        ({"min_turns": 0}, "min_turns"),
        ({"min_turns": 4}, "max_turns"),
        ({"max_names_per_turn": 1}, "max_names_per_turn"),
        ({"items": "letters", "max_names_per_turn": 9}, "max_names_per_turn"),
        ({"items": "words"}, "items"),
        ({"sort_by": "age"}, "sort_by"),
        ({"terse": True, "sort_by": "last"}, "sort_by"),
        ({"terse": "yes"}, "terse"),
        ({"similarity_power": "4"}, "similarity_power"),
        ({"demonstrate_mistakes": 2}, "demonstrate_mistakes"),
        ({"num_tasks": True}, "num_tasks"),
    ],
)
def test_wrong_args_are_refused_by_name(args, key):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("alphabet-sort", args)


def test_demonstrations_have_the_asked_share_of_mistakes():
    environment = AlphabetSort(items="letters", terse=True, max_turns=1, demonstrate_mistakes=0.3)
    shown = [demonstration.messages for demonstration in itertools.islice(environment.demonstrations(0), 1000)]
    wrong = sum(answer["content"].split() != sorted(question["content"].split()) for question, answer in shown)
    assert wrong / 1000 == pytest.approx(0.3, abs=0.06)  # four standard deviations: sqrt(.3 * .7 / 1000) = .0145
