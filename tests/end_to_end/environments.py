"""Environments for runs with an untrained model."""

import asyncio
import os
import time
from pathlib import Path

import numpy as np

from headrace.environments.base import Environment
from headrace.rollout.types import Rollout


class Letters(Environment):
    """Write letters: even random output gets a reward that differs between rollouts."""

    def tasks(self):
        return [{"word": f"word {n}"} for n in range(64)]

    async def run(self, task, context):
        reply = await context.chat([{"role": "user", "content": task.data["word"]}])
        share = sum(32 <= token < 127 for token in reply.turn.completion_ids) / len(reply.turn.completion_ids)
        return [Rollout(rewards={"printable": share}, messages=[reply.message], turns=[reply.turn])]


class EmptyHints(Letters):
    """The same with demonstrations that are empty: a teacher scores replies after their own prompts."""

    def tasks(self):
        return [{**task, "demonstration": ""} for task in super().tasks()]


class Duel(Letters):
    """Two sides of one policy: the side that writes more letters wins what the other loses."""

    async def run(self, task, context):
        replies = [await context.chat([{"role": "user", "content": f"{side} {task.data['word']}"}]) for side in "ab"]
        shares = [
            sum(32 <= token < 127 for token in reply.turn.completion_ids) / len(reply.turn.completion_ids)
            for reply in replies
        ]
        return [
            Rollout(
                agent=f"player_{seat}",
                rewards={"lead": shares[seat] - shares[1 - seat]},
                messages=[reply.message],
                turns=[reply.turn],
            )
            for seat, reply in enumerate(replies)
        ]


class SecondLetters(Environment):
    """Write letters twice, after a system message: only the second reply trains, without its first token."""

    def tasks(self):
        return [{"word": f"word {n}", "demonstration": f"letters {n}"} for n in range(64)]

    async def run(self, task, context):
        messages = [{"role": "system", "content": "Write."}, {"role": "user", "content": task.data["word"]}]
        first = await context.chat(messages)
        messages += [first.message, {"role": "user", "content": "again"}]
        second = await context.chat(messages)
        letters = second.turn.completion_ids
        first.turn.mask = np.zeros(len(first.turn.completion_ids), bool)
        second.turn.mask = np.arange(len(letters)) > 0
        share = sum(32 <= token < 127 for token in letters) / len(letters)
        turns = [first.turn, second.turn]
        return [Rollout(rewards={"printable": share}, messages=[*messages, second.message], turns=turns)]


class Broken(Letters):
    """An environment with a bug in it."""

    async def run(self, task, context):
        raise KeyError("no such column: question")


class Talk(Letters):
    """Two turns by hand: the second goes on from whatever the first came to, cut off or not."""

    async def run(self, task, context):
        messages = [{"role": "user", "content": task.data["word"]}]
        first = await context.chat(messages)
        messages += [first.message, {"role": "user", "content": "again"}]
        second = await context.chat(messages)
        letters = [*first.turn.completion_ids, *second.turn.completion_ids]
        share = sum(32 <= token < 127 for token in letters) / len(letters)
        return [Rollout(rewards={"printable": share}, messages=messages, turns=[first.turn, second.turn])]


def hangs(how):
    """Whether the file that HANG_FILE names exists and has this text."""
    file = Path(os.environ["HANG_FILE"])
    return file.exists() and file.read_text() == how


def block():
    while hangs("blocks"):
        time.sleep(0.1)


class Hanging(Letters):
    """Episodes hang while they are asked to: they await something, or block the event loop."""

    async def run(self, task, context):
        while hangs("awaits"):
            await asyncio.sleep(0.1)
        block()
        return await super().run(task, context)


class Judged(Letters):
    """Episodes take longer than a third of a minute, and the rewards of a group hang while they are asked to."""

    async def run(self, task, context):
        await asyncio.sleep(22)
        return await super().run(task, context)

    async def score_group(self, rollouts):
        while hangs("awaits"):
            await asyncio.sleep(0.1)
