"""Tasksets as people write them for verifiers, in its own API alone."""

import asyncio

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["Reverse"]


class WordData(vf.TaskData):
    answer: str


WORDS = ("hello", "the cat", "and 123")


class ReverseTask(vf.Task[WordData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        return {"short": float(len(trace.last_reply) < 20), "said": float(bool(trace.last_reply))}

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class ReverseConfig(vf.TasksetConfig):
    words: int = 3


class Reverse(vf.Taskset[ReverseTask, ReverseConfig]):
    """One question, one answer."""

    def load(self):
        for word in WORDS[: self.config.words]:
            data = WordData(prompt=f"Reverse {word}", system_prompt="Be brief.", answer=word[::-1])
            yield ReverseTask(data, self.config.task)


class NamedTask(ReverseTask):
    @property
    def key(self) -> str:
        return f"word-{self.data.answer}"


async def sleepy(trace: vf.Trace) -> float:
    """A reward that takes its time."""
    await asyncio.sleep(60)
    return 1.0


class Endless(vf.Taskset[NamedTask, vf.TasksetConfig]):
    """Tasks without end, and with keys of their own."""

    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield NamedTask(WordData(prompt=f"Reverse {number}", answer=str(number)[::-1]))
            number += 1


class Steps(vf.State):
    calls: int = 0
    log: list[str] = Field(default_factory=list)


class Calculator(vf.Toolset[vf.ToolsetConfig, Steps]):
    TOOL_PREFIX = None

    async def setup(self) -> None:
        self.greeting = "sum"

    async def setup_task(self, task: WordData) -> None:
        self.greeting += f" of {task.answer}"

    @vf.tool
    async def add(self, a: int, b: int = 0) -> str:
        """Add two numbers."""
        self.state.calls += 1
        if a < 0:
            raise ValueError("too small")
        return f"{self.greeting}: {a + b}"


class Diary(vf.Toolset[vf.SharedToolsetConfig, Steps]):
    """One for all episodes; what each writes is its own."""

    TOOL_PREFIX = "diary"
    opened = 0

    async def setup(self) -> None:
        type(self).opened += 1

    @vf.tool(name="note")
    def write(self, text: str) -> str:
        """Write a line."""
        self.state.log.append(text)
        return f"line {len(self.state.log)}"


class SumTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[WordData, Steps, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [Calculator(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(trace.state.calls)

    @vf.metric
    async def lines(self, trace: vf.Trace) -> float:
        return float(len(trace.state.log))


class SumConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    diary: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Sums(vf.Taskset[SumTask, SumConfig]):
    """With a toolset of each episode's own, and one that all share."""

    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [Diary(config.diary)]

    def load(self):
        yield SumTask(WordData(prompt="What is 17 + 25?", answer="42"), self.config.task)


class Oracle(vf.Toolset[vf.ToolsetConfig, Steps]):
    """It says itself what it has, and keeps something open while it is there."""

    closed = 0

    async def setup(self) -> None:
        self._exit_stack.callback(self.leave)

    def leave(self) -> None:
        type(self).closed += 1

    def register(self, mcp) -> None:
        mcp.add_tool(self.answer, name="answer", description="Know it.")

    def answer(self, question: str) -> list[str]:
        return [question[::-1], "42"]


class OracleTask(SumTask):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [Oracle(config.tools)]


class Oracles(vf.Taskset[OracleTask, SumConfig]):
    def load(self):
        yield OracleTask(WordData(prompt="What is it?", answer="42"), self.config.task)


class GuessTask(vf.Task[WordData]):
    """Several turns: a user who is the environment's code."""

    @vf.stop
    async def swears(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "damn"

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Guess(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        yield GuessTask(WordData(prompt="Guess a letter.", system_prompt="Be brief.", answer="k"))


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=4)


class GuessEnv(vf.Env[GuessEnvConfig]):
    started = stopped = 0

    async def start(self) -> None:
        type(self).started += 1

    async def stop(self) -> None:
        type(self).stopped += 1

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as player:
            said = await player.turn()
            while not said.terminated and said.last_reply != task.data.answer:
                said = await player.turn("later" if said.last_reply < task.data.answer else "earlier")


class ForkEnv(vf.Env[GuessEnvConfig]):
    """One trace that goes on from its first reply in two ways, as a harness of its own might do."""

    branches = 0

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        from headrace.environments.adapters.verifiers.seat import EPISODE

        async with agents.player.interaction(task) as player:
            await player.turn()
            seat, begun = EPISODE.get().by_trace[player.trace.id], list(player.trace.messages)
            for way in ("left", "right"):
                await seat.sample([*begun, vf.UserMessage(content=way)])
        type(self).branches = player.trace.num_branches


class DebateEnvConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    critic: vf.AgentConfig = vf.AgentConfig()
    audience: vf.AgentConfig = vf.AgentConfig()


class DebateEnv(vf.Env[DebateEnvConfig]):
    """Three agents: two go on from what the first has said, one of them is not to be trained."""

    async def setup(self, agents: vf.Agents) -> None:
        agents.audience.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        first = await agents.proposer.run(task)

        def ask(agent: vf.Agent, question: str) -> object:
            prompt = [*first.messages, vf.UserMessage(content=question)]
            return agent.run(vf.Task(vf.TaskData(prompt=prompt)))

        await asyncio.gather(ask(agents.critic, "Is that right?"), ask(agents.audience, "Do you like it?"))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        for trace in episode.traces:
            if trace.agent.name == "critic":
                trace.record_reward("agrees", float(trace.last_reply == "yes"), 2.0)
                trace.record_metric("heard", float(len(trace.messages)))


class PrintableTask(vf.Task[vf.TaskData]):
    """Even random output earns something, and not always the same."""

    @vf.reward
    async def printable(self, trace: vf.Trace) -> float:
        said = [message.content or "" for message in trace.assistant_messages]
        return sum(32 <= ord(letter) < 127 for text in said for letter in text) / 100


class Printable(vf.Taskset[PrintableTask, vf.TasksetConfig]):
    def load(self):
        for number in range(64):
            yield PrintableTask(vf.TaskData(prompt=f"word {number}"))


class AgainEnv(vf.Env[GuessEnvConfig]):
    """Two turns, whatever is said."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as player:
            await player.turn()
            await player.turn("again")


class BrokenTask(vf.Task[WordData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.info["set up"] = True

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("last.txt", trace.last_reply.encode())

    @vf.reward
    async def right(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        if trace.last_reply == "boom":
            raise LookupError("no such answer")
        return float((await runtime.read("last.txt")).decode() == self.data.answer and trace.info["set up"])


class Broken(vf.Taskset[BrokenTask, vf.TasksetConfig]):
    """A reward that can raise, and hooks before and after that use the runtime."""

    def load(self):
        yield BrokenTask(WordData(prompt="Say hello.", answer="hello"))


class HookedTask(vf.Task[WordData]):
    """All kinds of hooks around a call to the model."""

    @vf.intercept
    async def polite(self, request: vf.Request) -> vf.Request | None:
        last = request.messages[-1]
        if not isinstance(last, vf.UserMessage) or not isinstance(last.content, str) or "please" in last.content:
            return None
        messages = [*request.messages[:-1], vf.UserMessage(content=f"{last.content} please")]
        return request.model_copy(update={"messages": messages})

    @vf.intercept
    async def censor(self, response: vf.Response) -> vf.Response | None:
        if "secret" not in (response.message.content or ""):
            return None
        return response.model_copy(update={"message": vf.AssistantMessage(content="...")})

    @vf.stop
    async def silent(self, response: vf.Response) -> bool:
        return not response.message.content

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Hooked(vf.Taskset[HookedTask, vf.TasksetConfig]):
    def load(self):
        yield HookedTask(WordData(prompt="Guess", answer="k"))


class ContainerTask(vf.Task[WordData]):
    NEEDS_CONTAINER = True


class Containers(vf.Taskset[ContainerTask, vf.TasksetConfig]):
    def load(self):
        return []


class Images(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self):
        yield ReverseTask(WordData(prompt="Go.", answer="x", image="python:3.11"))
