"""The data of a probe: sent by the environment's process, and printed by `--json`. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.environments.base import EpisodeError, evenly_spaced
from headrace.rollout.checks import reward_problem, total_reward
from headrace.rollout.types import Message, Rollout

TINY = "tiny"
"""The tokenizer and chat format of `headrace init-model tiny`, in which a byte is a token."""


class LoadResult(msgspec.Struct):
    """Load times in seconds, and the number and size of the tasks."""

    import_seconds: float
    load_seconds: float
    """The constructor and `start`."""
    tasks_seconds: float
    tasks: int
    task_bytes: int
    """Size of all tasks as JSON."""
    scores_groups: bool
    folder: str
    """The folder of the environment's code."""


class EpisodeProblem(msgspec.Struct, frozen=True):
    """Why an episode has no reward. `place` is the file and line at fault, if there is one."""

    reason: str
    text: str
    place: str = ""


class Exchange(msgspec.Struct):
    """The first prompt of an episode, its tools, and the whole conversation."""

    prompt: list[Message]
    tools: list[dict[str, Any]]
    conversation: list[Message]


class ProbeEpisode(msgspec.Struct):
    """One completion on one task. Times exclude the time that making the completion took."""

    completion: str
    task: int
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    reward: float | None = None
    """Mean total reward over the trained agents; `rewards` has the means by component."""
    earned: list[float] = msgspec.field(default_factory=list)
    """Total reward of each trained agent."""
    problem: EpisodeProblem | None = None
    seconds: float = 0.0
    cpu_seconds: float | None = 0.0
    """None if the process was killed or died."""
    blocked_seconds: float = 0.0
    """The longest time for which the event loop was blocked."""
    replies: int = 0
    endless: bool = False
    """Whether the episode requested more replies than a probe gives."""
    offers_tools: bool = False
    says_gold: bool = False
    """Whether all replies were equal to the gold replies."""
    exchange: Exchange | None = None


class ShownPrompt(msgspec.Struct):
    """The rendered first prompt of a task."""

    task: int
    key: str
    text: str
    tokens: int


class OfferedTool(msgspec.Struct):
    """A tool of the first prompts; of several with the same name, the first."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema."""
    share: float = 0.0
    """Share of first prompts that offer the tool."""


class Prompts(msgspec.Struct):
    """The first prompts of all tasks that ran, as rendered with the chat format and tools."""

    tokenizer: str
    """The model whose tokenizer and chat format were used."""
    shown: list[ShownPrompt]
    lengths: list[int]
    """Tokens of each prompt."""
    conversation_lengths: list[int]
    """Tokens of each whole conversation, including the last reply."""
    tools: list[OfferedTool] = msgspec.field(default_factory=list)
    problem: str = ""
    """Why a conversation could not be rendered."""


class SignalPrediction(msgspec.Struct, frozen=True):
    """Shares of groups of `group_size` episodes."""

    group_size: int
    without_signal: float
    low: float
    high: float
    too_hard: float
    """Share without signal whose reward is at most the midpoint of the lowest and highest reward of all tasks."""
    too_easy: float
    """Share without signal whose reward is above the midpoint."""
    is_bound: bool = False
    """Whether there are too few episodes: the shares are upper bounds, from the largest groups that are possible."""


class SampledEpisodes(msgspec.Struct):
    """Episodes that a model has sampled."""

    model: str
    group_size: int
    rewards: list[list[list[float]]]
    """By task and episode: the total rewards of all trained agents."""
    problems: list[EpisodeProblem]
    episodes: int
    truncated: int
    seconds: float
    predictions: list[SignalPrediction]
    """For the run's group size and all sizes with enough episodes; empty if all episodes failed."""


class ProbeReport(msgspec.Struct):
    """All that a probe has measured."""

    environment: str
    args: dict[str, Any]
    opening: LoadResult
    keys: list[str]
    """Keys of the tasks in `played`."""
    played: list[int]
    """Indices of the tasks that ran."""
    duplicates: int
    first_difference: int | None
    """Index of the first task that differed in a second process."""
    episodes: list[ProbeEpisode]
    unstable: list[str]
    """Completions whose reward differed when they ran a second time."""
    closing: EpisodeProblem | None
    prompts: Prompts | None = None
    seq_len: int | None = None
    sampled: SampledEpisodes | None = None

    def of(self, completion: str) -> list[ProbeEpisode]:
        return [episode for episode in self.episodes if episode.completion == completion]

    @property
    def agents(self) -> int:
        """The largest number of trained agents in an episode."""
        return max((len(episode.earned) for episode in self.episodes), default=0)


def episode_rewards(rollouts: Sequence[Rollout]) -> tuple[dict[str, float], list[float]]:
    """Return mean rewards by component, and the total reward of each trained agent; raises `EpisodeError`."""
    trained = [rollout for rollout in rollouts if rollout.trainable]
    if not trained:
        raise EpisodeError("no_rollout", "the episode returned no rollout that is trained")
    for rollout in trained:
        if rollout.error is not None:
            raise EpisodeError(rollout.error.reason, rollout.error.detail)
        rewards: dict[str, Any] = rollout.rewards  # users' code may return other types
        if not rewards or not all(isinstance(v, int | float) and math.isfinite(v) for v in rewards.values()):
            raise EpisodeError("invalid_reward", f"rewards {rewards} do not sum to a finite number")
        if problem := reward_problem(rollout.rewards):
            raise EpisodeError("invalid_reward", problem)
    names = dict.fromkeys(name for rollout in trained for name in rollout.rewards)
    by_name = {name: sum(float(r.rewards.get(name, 0.0)) for r in trained) / len(trained) for name in names}
    return by_name, [total_reward(rollout.rewards) for rollout in trained]


RenderExchange = Callable[[Exchange], tuple[str, int, int]]
"""Returns the text of the first prompt, its length, and the length of the whole conversation, in tokens."""


def summarize_prompts(report: ProbeReport, examples: int, render: RenderExchange, tokenizer: str) -> Prompts:
    """Return the lengths and tools of all tasks that ran, and the text of `examples` of them, spread evenly."""
    exchanges = {episode.task: episode.exchange for episode in reversed(report.episodes) if episode.exchange}
    keys = dict(zip(report.played, report.keys, strict=True))
    tasks = sorted(exchanges)
    tools: dict[str, OfferedTool] = {}
    for task in tasks:
        for function in (tool["function"] for tool in exchanges[task].tools):
            description = function.get("description", ""), function.get("parameters", {})
            tool = tools.setdefault(function["name"], OfferedTool(function["name"], *description))
            tool.share += 1 / len(exchanges)
    prompts = Prompts(tokenizer, [], [], [], list(tools.values()))
    shown_tasks = [tasks[index] for index in evenly_spaced(len(tasks), examples)]
    for task in tasks:
        try:
            text, length, conversation_length = render(exchanges[task])
        except Exception as error:  # chat templates may raise anything for messages that they cannot render
            prompts.problem = f"task {task}: {type(error).__name__}: {error}"
            break
        prompts.lengths.append(length)
        prompts.conversation_lengths.append(conversation_length)
        if task in shown_tasks:
            prompts.shown.append(ShownPrompt(task, keys[task], text, length))
    return prompts


def exchange_renderer(directory: Path, renderer_options: dict[str, Any]) -> RenderExchange:
    """Return a function that renders with a model directory's tokenizer and chat format, chosen as in a run."""
    from headrace.text.prompt import PromptRenderer
    from headrace.text.renderer import make_renderer
    from headrace.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(directory)
    renderer = make_renderer(directory, tokenizer, **renderer_options)
    prompts = PromptRenderer(renderer)

    def render(exchange: Exchange) -> tuple[str, int, int]:
        ids = prompts.render(exchange.prompt, exchange.tools).ids
        tools: Any = exchange.tools or None
        messages: Any = exchange.conversation
        return tokenizer.decode(ids), len(ids), len(renderer.render_ids(messages, tools=tools))

    return render
