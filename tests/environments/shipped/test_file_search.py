"""Answer questions from files that must be found first."""

import itertools
import re

import pytest

from headrace.environments.chat import ToolError
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.script import call_tool, play
from headrace.environments.shipped.file_search import (
    FILLERS,
    FileSearch,
    is_right,
    load_files,
    load_questions,
    rank_files,
    search,
    words_of,
)
from headrace.rollout.types import Task
from tests.environments.shipped.games import (
    HOSTILE,
    first_tasks,
    heard,
    play_gold,
    play_mistakes,
    play_replies,
    total,
)
from tests.refusals import refused

HERON = Task(
    "game",
    {"file": "penderby.md", "question": "What was the name of Penderby's tame heron?", "answer": "Bishop"},
)


async def test_a_model_searches_reads_and_answers():
    rollout = await play_replies(
        FileSearch(), HERON, call_tool("search", query="heron"), call_tool("read", name="penderby.md"), "It was Bishop."
    )
    question, hits, text = heard(rollout)
    assert question.startswith("What was the name of Penderby's tame heron?\n")
    assert hits == "penderby.md: Silas Penderby, engineer"
    assert text.startswith("# Silas Penderby, engineer\n\nSilas Penderby was born in 1738")
    assert rollout.rewards == {"correct": 1.0, "reading": 0.1}
    assert rollout.metrics == {"tool_calls": 2, "tool_errors": 0, "turns": 3, "files_read": 1}


async def test_reading_the_right_file_earns_its_part_even_if_the_answer_is_wrong():
    rollout = await play_replies(FileSearch(), HERON, call_tool("read", name="penderby.md"), "Walpole")
    assert rollout.rewards == {"correct": 0.0, "reading": 0.1}


async def test_an_answer_without_reading_earns_no_more_than_its_being_correct():
    rollout = await play_replies(FileSearch(), HERON, call_tool("read", name="lock-seven.md"), "Bishop")
    assert rollout.rewards == {"correct": 1.0, "reading": 0.0}


@pytest.mark.parametrize(
    "call",
    [
        call_tool("read", name="../registry.py"),
        call_tool("read", name="/etc/passwd"),
        call_tool("read", name="questions.json"),
        call_tool("read", name="x" * (10 * 2**20)),
        call_tool("read", name=None),
        call_tool("read"),
        call_tool("search", query=""),
        call_tool("search", query="(+)+$ [ \\ .* ???"),
        call_tool("search", query="xyzzy plugh"),
        call_tool("search", query="\ud800"),
        call_tool("search", query=["heron"]),
        call_tool("delete", name="penderby.md"),
    ],
)
async def test_failing_calls_return_a_short_error(call):
    rollout = await play_replies(FileSearch(), HERON, call, "")
    error = heard(rollout)[1]
    assert error.startswith("Error: ")
    assert len(error) < 300
    assert rollout.metrics["tool_errors"] == 1
    assert total(rollout) == 0


@pytest.mark.parametrize("query", ["mill " * 2**21, ".*+?[mill](", "".join(load_files()), "the a of " * 30 + "canal"])
def test_whatever_is_asked_a_search_names_five_files_at_most(query: str):
    listed = search(query).splitlines()
    assert 1 <= len(listed) <= 5
    assert all(line.split(": ")[0] in load_files() for line in listed)


def test_words_in_every_file_find_nothing():
    assert set.intersection(*(set(file.words) for file in load_files().values())) >= {"the"}
    with pytest.raises(ToolError, match="other words"):
        search("the")


def test_rare_words_count_for_more():
    assert rank_files("the heron and the canal of the town")[0] == "penderby.md"


@pytest.mark.parametrize("question", load_questions(), ids=lambda question: question["answer"])
def test_every_question_finds_its_file_and_has_its_answer_there(question):
    assert question["file"] in rank_files(question["question"])
    text, wanted = words_of(load_files()[question["file"]].text), words_of(question["answer"])
    assert any(text[start : start + len(wanted)] == wanted for start in range(len(text)))
    assert not is_right(question["question"], question["answer"])


def test_questions_are_distinct_and_every_file_has_some():
    assert len({question["question"] for question in load_questions()}) == len(load_questions()) == 120
    assert {question["file"] for question in load_questions()} == set(load_files())
    assert max(len(file.text) for file in load_files().values()) < 1000


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("Bishop", "Bishop", True),
        ("  bishop.\n", "Bishop", True),
        ("It was called Bishop", "Bishop", True),
        ("The answer is: **Bishop**.", "Bishop", True),
        ("The heron was called Bishop", "Bishop", False),  # who repeats the question has not given the answer alone
        ("not Bishop", "Bishop", False),
        ("It is not the Bishop", "Bishop", False),
        ("It isn't Bishop", "Bishop", False),
        ("Bishop or Walpole", "Bishop", False),
        ("Penderby 1701 1702 1703 1704", "Penderby", False),
        ("9, 10", "9", False),
        ("in 1802", "1802", True),
        ("1802 1803", "1802", False),
        ("Bishops", "Bishop", False),
        ("Hobb's mere", "Hobb's Mere", True),
        ("Mere Hobb's", "Hobb's Mere", False),
        ("9 miles", "9", True),
        ("19 miles", "9", False),
        ("flour, salt, and butter", "Flour, Salt and Butter", True),
        ("", "Bishop", False),
        ("Bishop" + " " * 1000, "Bishop", False),
    ],
)
def test_an_answer_is_right_if_it_is_short_and_has_the_words_in_it(text: str, answer: str, right: bool):
    assert is_right(text, answer) is right


def test_answers_with_what_is_counted_are_right():
    asked = [(re.search(r"How many (?:lime )?(\w+)", q["question"]), q["answer"]) for q in load_questions()]
    counted = [
        f"{answer} {found[1]}." for found, answer in asked if found and is_right(f"{answer} {found[1]}.", answer)
    ]
    assert len(counted) == sum(found is not None for found, _ in asked) >= 15


def test_no_answer_is_made_of_fillers():
    assert all(not FILLERS.issuperset(words_of(question["answer"])) for question in load_questions())


def test_who_names_two_answers_of_a_file_has_given_none():
    for one, other in itertools.permutations(load_questions(), 2):
        if one["file"] == other["file"] and one["answer"] != other["answer"]:
            assert not is_right(f"{one['answer']}, {other['answer']}", one["answer"])
            assert not is_right(f"{other['answer']} or {one['answer']}", one["answer"])


def test_demonstrations_for_training_never_ask_what_evaluation_asks():
    held_out = {value for task in FileSearch("eval").tasks() for value in (task["question"], task["file"])}
    said = set()
    for shown in itertools.islice(FileSearch("train", demonstrate_mistakes=0.5).demonstrations(0), 200):
        for call in itertools.chain(*(message.get("tool_calls", []) for message in shown.messages)):
            said.update(call["function"]["arguments"].values())
    assert len(said) > 100
    assert said.isdisjoint(held_out)


async def test_a_file_recited_is_no_answer():
    text = load_files()["penderby.md"].text
    rollout = await play_replies(FileSearch(), HERON, call_tool("read", name="penderby.md"), text)
    assert rollout.rewards == {"correct": 0.0, "reading": 0.1}


async def test_gold_earns_everything_and_mistakes_less():
    for split in ("train", "eval"):
        environment = FileSearch(split)
        for task in first_tasks(environment, 120):
            rollout = await play_gold(environment, task)
            assert rollout.rewards == {"correct": 1.0, "reading": 0.1}
            assert rollout.metrics == {"tool_calls": 2, "tool_errors": 0, "turns": 3, "files_read": 1}
            mistaken = await play_mistakes(environment, task)
            assert total(mistaken) == 0


async def test_gold_finishes_in_time_after_mistakes():
    environment = FileSearch(max_turns=4)
    said = iter([call_tool("search", query="mule"), call_tool("read", name="great-flood.md")])
    (rollout,), _ = await play(environment, HERON, lambda past: next(said, None) or environment.gold(HERON, past))
    assert rollout.rewards == {"correct": 1.0, "reading": 0.1}
    assert rollout.metrics["turns"] == 4


async def test_calls_without_end_end_with_the_turns():
    rollout = await play_replies(FileSearch(), HERON, call_tool("search", query="heron"))
    assert (total(rollout), rollout.metrics["turns"], rollout.stop_reason) == (0, 6, "max_turns")


def test_no_file_is_asked_about_in_both_splits():
    train, evaluation = FileSearch("train").tasks(), FileSearch("eval").tasks()
    assert (len(train), len(evaluation)) == (96, 24)
    assert {task["file"] for task in train}.isdisjoint(task["file"] for task in evaluation)


def test_tasks_depend_on_the_seed_alone():
    assert FileSearch(seed=3).tasks() == FileSearch(seed=3).tasks()
    assert FileSearch(seed=3).tasks() != FileSearch(seed=4).tasks()
    assert FileSearch(num_tasks=7).tasks() == FileSearch().tasks()[:7]


@pytest.mark.parametrize("reply", HOSTILE)
async def test_hostile_replies_earn_nothing(reply):
    assert total(await play_replies(FileSearch(), HERON, reply)) == 0


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"split": "test"}, "split"),
        ({"num_tasks": 0}, "num_tasks"),
        ({"max_turns": 2}, "max_turns"),
        ({"demonstrate_mistakes": None}, "demonstrate_mistakes"),
    ],
)
def test_wrong_args_are_refused_by_name(args, key):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("file-search", args)
