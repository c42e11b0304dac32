"""The same three environments twice: as tasksets of verifiers, and as our own."""

from __future__ import annotations

import verifiers.v1 as vf

from headrace.environments.base import Context, Environment
from headrace.environments.chat import Chat
from headrace.rollout.types import Rollout, Task

TASKS = 256
TURNS = 3


def questions() -> list[dict[str, str]]:
    return [{"question": f"What is {n} * {n + 7}?", "answer": str(n * (n + 7))} for n in range(TASKS)]


def calculate(expression: str) -> str:
    """The value of an arithmetic expression such as 12 * (3 + 4)."""
    left, _, right = expression.partition("*")
    return str(int(left) * int(right))


class Question(Environment):
    """One question, one answer."""

    def tasks(self) -> list[dict[str, str]]:
        return questions()

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        return await self.talk(task, Chat(context, task.data["question"], system="Be brief."))

    async def talk(self, task: Task, chat: Chat) -> list[Rollout]:
        await chat.act()
        return [chat.rollout({"right": float(chat.text == task.data["answer"])}, {"letters": len(chat.text)})]


class Talk(Question):
    """The same question three times."""

    async def talk(self, task: Task, chat: Chat) -> list[Rollout]:
        for _ in range(TURNS - 1):
            await chat.reply()
            chat.say("Are you sure?")
        return await super().talk(task, chat)


class Calculation(Question):
    """With a tool that is called once."""

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        return await self.talk(task, Chat(context, task.data["question"], system="Be brief.", tools=[calculate]))


class QuestionData(vf.TaskData):
    answer: str


class QuestionTask(vf.Task[QuestionData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class Questions(vf.Taskset[QuestionTask, vf.TasksetConfig]):
    def load(self):
        for row in questions():
            data = QuestionData(prompt=row["question"], system_prompt="Be brief.", answer=row["answer"])
            yield QuestionTask(data, self.config.task)


class TalkConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as player:
            await player.turn()
            for _ in range(TURNS - 1):
                await player.turn("Are you sure?")


class Count(vf.State):
    calls: int = 0


class CalculateToolset(vf.Toolset[vf.ToolsetConfig, Count]):
    TOOL_PREFIX = None

    @vf.tool
    async def calculate(self, expression: str) -> str:
        """The value of an arithmetic expression such as 12 * (3 + 4)."""
        self.state.calls += 1
        return calculate(expression)


class CalculationTask(QuestionTask, vf.Task[QuestionData, Count, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [CalculateToolset(vf.ToolsetConfig())]


class Calculations(vf.Taskset[CalculationTask, vf.TasksetConfig]):
    def load(self):
        for row in questions():
            data = QuestionData(prompt=row["question"], system_prompt="Be brief.", answer=row["answer"])
            yield CalculationTask(data, self.config.task)
