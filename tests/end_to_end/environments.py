"""Environments for runs with an untrained model."""

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


class Broken(Letters):
    """An environment with a bug in it."""

    async def run(self, task, context):
        raise KeyError("no such column: question")
