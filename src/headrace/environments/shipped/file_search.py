"""Answer questions from files that must be found first: a model searches, reads, and answers.

The files are about an invented town, so that no model has memorized the answers. The corpus is some thirty short texts;
ranking them needs no index. Left out: other corpora.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from headrace.environments import arguments
from headrace.environments.base import Context, Environment
from headrace.environments.chat import Chat, ToolError
from headrace.environments.script import call_tool
from headrace.environments.shipped.common import check_split, replies
from headrace.rollout.types import Message, Rollout, Task

MAX_HITS = 5
"""Files that a search returns."""
MAX_QUERY_CHARACTERS = 500
READING_REWARD = 0.1
"""Reward for having read the right file."""
_WORD = re.compile(r"\w+")
FILLERS = frozenset(
    _WORD.findall(
        "a an answer are at by called for from in is it its named of on s that the they this to was were with "
        "acres bells clocks feet floats gallons inches kilns links men miles people seconds sides tons yards"
    )
)
"""Words that may stand beside an answer. Any other word makes it wrong: several answers count as none."""
MAX_ANSWER_CHARACTERS = 500
EVAL_SHARE = 5
"""One file in this many is for evaluation: training has no question about it."""
PROMPT = "{question}\nFind the answer in the files about the town of Ollenby, then reply with the answer alone."


class File(NamedTuple):
    title: str
    text: str
    words: frozenset[str]


@dataclass(eq=False)
class FileSearch(Environment):
    """`num_tasks` of the split's questions; unset, all of them."""

    split: str = "train"
    num_tasks: int | None = None
    max_turns: int = 6
    seed: int = 0
    demonstrate_mistakes: float = 0.0

    def __post_init__(self) -> None:
        check_split(self.split)
        if self.num_tasks is not None:
            arguments.check_whole("num_tasks", self.num_tasks, 1)
        arguments.check_whole("max_turns", self.max_turns, 3)
        arguments.check_mistakes(self.demonstrate_mistakes)

    def tasks(self) -> list[dict[str, Any]]:
        tasks = [dict(question) for question in self._questions()]
        random.Random(f"{self.seed}-{self.split}").shuffle(tasks)
        return tasks[: self.num_tasks]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        seen: set[str] = set()
        prompt = PROMPT.format(question=task.data["question"])
        chat = Chat(context, prompt, tools=[search, _make_read_tool(seen)], max_turns=self.max_turns)
        reply = await chat.act()
        correct = reply is not None and is_right(reply.text, task.data["answer"])
        rewards = {"correct": float(correct), "reading": READING_REWARD * (task.data["file"] in seen)}
        return [chat.rollout(rewards, {"turns": len(chat.turns), "files_read": len(seen)})]

    def gold(self, task: Task, messages: Sequence[Message]) -> Message | str:
        return self._next_reply(task.data, messages)

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message | str:
        """Return the gold reply to another question; once the file is read, to another one about the same file."""
        read = _tool_returned(messages, load_files()[task.data["file"]].text)
        others = [
            question
            for question in self._questions()
            if (question["file"] == task.data["file"]) == read and not is_right(question["answer"], task.data["answer"])
        ]
        return self._next_reply(rng.choice(others), messages)

    def _questions(self) -> list[dict[str, str]]:
        """Return the questions of this split."""
        held_out = set(sorted(load_files())[::EVAL_SHARE])
        return [question for question in load_questions() if (question["file"] in held_out) == (self.split == "eval")]

    def _next_reply(self, question: dict[str, str], messages: Sequence[Message]) -> Message | str:
        """Return a search, then a call that reads the file, then the answer, within the turns that are left."""
        left = self.max_turns - len(replies(messages))
        if left <= 1 or _tool_returned(messages, load_files()[question["file"]].text):
            return question["answer"]
        if left == 2 or _tool_returned(messages, question["file"]):
            return call_tool("read", name=question["file"])
        return call_tool("search", query=question["question"])


def search(query: str) -> str:
    """Find files by words. Gives the names and titles of those that fit best."""
    listed = rank_files(query)
    if not listed:
        raise ToolError("nothing was found: use other words")
    return "\n".join(f"{name}: {load_files()[name].title}" for name in listed)


def _make_read_tool(seen: set[str]) -> Callable[[str], str]:
    """Return the `read` tool of one episode; it adds the names of the files to `seen`."""

    def read(name: str) -> str:
        """The text of the file of this name."""
        if name not in load_files():
            raise ToolError("there is no file of this name: search gives the names")
        seen.add(name)
        return load_files()[name].text

    return read


def rank_files(query: str) -> list[str]:
    """Return the files with the most words of a query, weighted by rarity; at most `MAX_HITS`."""
    query_words = set(words_of(query[:MAX_QUERY_CHARACTERS]))
    scores = {name: sum(_rarity(word) for word in query_words & file.words) for name, file in load_files().items()}
    best = sorted((name for name in scores if scores[name] > 0), key=lambda name: (-scores[name], name))
    return best[:MAX_HITS]


def is_right(text: str, answer: str) -> bool:
    """Return whether a short reply is the words of the answer in sequence, with nothing else but fillers."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return False
    words, wanted = words_of(text), words_of(answer)
    ends = ((start, start + len(wanted)) for start in range(len(words) - len(wanted) + 1))
    return any(words[start:end] == wanted and FILLERS.issuperset(words[:start] + words[end:]) for start, end in ends)


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


@functools.cache
def load_files() -> dict[str, File]:
    """Return the files of the corpus by name, sorted."""
    loaded = {}
    for entry in _corpus().iterdir():
        if entry.name.endswith(".md"):
            text = entry.read_text(encoding="utf-8")
            loaded[entry.name] = File(text.partition("\n")[0].removeprefix("# "), text, frozenset(words_of(text)))
    return dict(sorted(loaded.items()))


@functools.cache
def load_questions() -> list[dict[str, str]]:
    """Return all questions: dicts of `file`, `question` and `answer`."""
    listed: list[dict[str, str]] = json.loads(_corpus().joinpath("questions.json").read_text(encoding="utf-8"))
    return listed


def _corpus() -> Any:
    return resources.files("headrace.environments.shipped").joinpath("corpus")


@functools.cache
def _rarity(word: str) -> float:
    """Return the inverse document frequency of a word that is in some file."""
    return math.log(len(load_files()) / sum(word in file.words for file in load_files().values()))


def _tool_returned(messages: Sequence[Message], text: str) -> bool:
    return any(message["role"] == "tool" and text in message["content"] for message in messages)
