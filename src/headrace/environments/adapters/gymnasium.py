"""Gymnasium environments whose observations and actions are texts, or can be rendered as texts.

`id = "gymnasium:FrozenLake-v1"` makes a registered one, `id = "gymnasium:my_module:MyGame"` calls a class or a function
of your own with `reset(seed=...)` and `step(action)`, for which Gymnasium need not be installed. Left out: vectorised
environments, and images.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace import imports
from headrace.environments.adapters import import_library
from headrace.environments.arguments import bind_args, check_flag, check_whole, import_argument
from headrace.environments.base import Context, Environment, EpisodeError
from headrace.environments.chat import Chat
from headrace.environments.shipped.common import extract_tagged, seeds_of
from headrace.errors import BadInput
from headrace.rollout.types import Rollout, Task

_COLOUR = re.compile(r"\x1b\[[\d;]+m")
_PLAIN = "\x1b[0m"
TAG_RULE = "Write your action between <{tag}> and </{tag}>."


class BadAction(ValueError):
    """A reply that is not an action; the message is sent to the model. A `parse` of your own may raise it."""


@dataclass(eq=False)
class GymnasiumText(Environment):
    """Episodes from `reset(seed)` to the end of the game; the tasks are `num_tasks` seeds. `make` has the arguments of
    the Gymnasium environment.

    Each observation is a message to the model, whose reply is the action: the text between tags of the name `tag`, or
    the whole reply (`tag = ""`). `prompt` precedes the first observation; unset, it describes the tag.

    - `parse`, an import path: a function of (text, environment) that returns the action. Unset: a number for an
      action space with `n` and `start`, such as `Discrete`, and a text for any other.
    - `render`, an import path: a function of (observation, info, environment) that returns a text. Unset: a text as it
      is; for any other observation the result of `environment.render()`, if that is a text, else `str(observation)`.

    The rewards of all steps are summed. A reply that is not an action uses up a turn, is rewarded with `bad_action`,
    and is explained to the model. With `blocking` the game runs in threads: for one whose steps wait for something.
    """

    name: str
    split: str = "train"
    num_tasks: int = 1000
    max_turns: int = 20
    prompt: str | None = None
    tag: str = "action"
    parse: str | None = None
    render: str | None = None
    bad_action: float = 0.0
    blocking: bool = False
    make: dict[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._seeds = seeds_of(self.split, self.num_tasks, self.seed)
        check_whole("max_turns", self.max_turns, 1)
        check_flag("blocking", self.blocking)
        self._make = _find_game(self.name, self.make or {})
        self._parse: Callable[..., Any] = import_argument("parse", self.parse) if self.parse else parse_action
        self._render: Callable[..., str] = import_argument("render", self.render) if self.render else render_observation

    def tasks(self) -> list[dict[str, Any]]:
        return [{"seed": seed} for seed in self._seeds]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        game = await self._call(self._make)
        try:
            return [await self._play(game, task.data["seed"], context)]
        finally:
            if hasattr(game, "close"):
                await self._call(game.close)

    async def _play(self, game: Any, seed: int, context: Context) -> Rollout:
        reset = await self._call(partial(game.reset, seed=seed))
        observation, info = _check_parts("reset", reset, 2, "(observation, info)")
        rules = TAG_RULE.format(tag=self.tag) if self.prompt is None and self.tag else self.prompt
        first = [rules, self._render(observation, info, game)]
        chat = Chat(context, "\n\n".join(part for part in first if part), max_turns=self.max_turns)
        total, bad = 0.0, 0
        while reply := await chat.reply():
            try:
                text = extract_tagged(reply.text, self.tag) if self.tag else reply.text
                if text is None:
                    raise BadAction(TAG_RULE.format(tag=self.tag))
                action = self._parse(text.strip(), game)
            except BadAction as error:
                bad += 1
                chat.say(str(error))
                continue
            step = await self._call(partial(game.step, action))
            expected = "(observation, reward, terminated, truncated, info)"
            observation, reward, terminated, truncated, info = _check_parts("step", step, 5, expected)
            total += float(reward)
            if terminated or truncated:
                chat.stop("terminated" if terminated else "time_limit")
            else:
                chat.say(self._render(observation, info, game))
        rewards = {"reward": total, **({"bad_action": self.bad_action * bad} if self.bad_action else {})}
        return chat.rollout(rewards, {"turns": len(chat.turns), "bad_actions": bad})

    async def _call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function) if self.blocking else function()


def parse_action(text: str, game: Any) -> Any:
    """Return the action that a text names: one of a `Discrete` space by its number, or the text itself."""
    space: Any = getattr(game, "action_space", None)
    if not (hasattr(space, "n") and hasattr(space, "start")):
        return text
    start, last = int(space.start), int(space.start + space.n) - 1
    if not (text.lstrip("-").isdecimal() and text.isascii() and len(text) < 20 and start <= int(text) <= last):
        raise BadAction(f"An action is a whole number from {start} to {last}.")
    return int(text)


def render_observation(observation: Any, info: Any, game: Any) -> str:
    """Return an observation as text; terminal colours, which mark positions, become brackets."""
    if isinstance(observation, str):
        return observation
    drawn = game.render() if getattr(game, "render_mode", None) == "ansi" else None
    return _COLOUR.sub("[", drawn.replace(_PLAIN, "]")).strip("\n") if isinstance(drawn, str) else str(observation)


def _check_parts(method: str, returned: Any, count: int, expected: str) -> Any:
    """Return what a method of a game returned; raise unless it is a tuple of `count` parts."""
    if not isinstance(returned, tuple) or len(returned) != count:
        raise EpisodeError("environment", f"{method}() must return {expected}, not {returned!r:.200}", place=method)
    return returned


def _find_game(name: str, make: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that makes a game, after checking its name and arguments."""
    if ":" in name and not name.startswith("gymnasium"):
        return bind_args(imports.load(name, None), make, within="make.")
    gymnasium = import_library("gymnasium", "gymnasium")
    try:
        specification = gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise BadInput(f"unknown environment: {error}", value=f"gymnasium:{name}") from error
    entry: Any = specification.entry_point
    kind = imports.load(entry, "environment") if isinstance(entry, str) else entry
    renders_text = "ansi" in getattr(kind, "metadata", {}).get("render_modes", ())
    render = {"render_mode": "ansi"} if renders_text else {}
    return lambda: gymnasium.make(name, **{"disable_env_checker": True, **render, **make})
