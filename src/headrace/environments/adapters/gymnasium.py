"""Environments in Gymnasium's form whose observations and actions are texts, or can be told in texts.

`id = "gymnasium:FrozenLake-v1"` makes a registered one, `id = "gymnasium:my_module:MyGame"` calls a class or a function
of your own, for which Gymnasium need not be installed: anything with `reset(seed=...)` and `step(action)` will do. Left
out: vectorised environments, and pictures.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace import imports
from headrace.environments.adapters import library
from headrace.environments.arguments import bound, check_flag, check_whole, import_argument
from headrace.environments.base import Context, Environment, EpisodeError
from headrace.environments.chat import Chat
from headrace.environments.shipped.drawing import seeds_of
from headrace.environments.shipped.texts import tagged
from headrace.errors import BadInput
from headrace.rollout.types import Rollout, Task

_COLOUR = re.compile(r"\x1b\[[\d;]+m")
_PLAIN = "\x1b[0m"
TAGGED = "Write your action between <{tag}> and </{tag}>."


class BadAction(ValueError):
    """A reply that is no action; the message is told to the model. A `parse` of your own may raise it."""


class GymnasiumText(Environment):
    """One episode from `reset(seed)` to the end of the game; the tasks are `num_tasks` seeds. `make` are the arguments
    of the environment itself.

    Each observation is a message to the model, whose reply is the action: the text between tags of the name `tag`, or
    all of it (`tag = ""`). `prompt` is said before the first observation, and the words about the tag if it is unset.

    - `parse`, an import path: a function of (text, environment) that gives the action. Unset: a number for an
      action space with `n` and `start`, as `Discrete` is, and a text for any other.
    - `render`, an import path: a function of (observation, info, environment) that gives the text. Unset: a text as it
      is; for any other observation what `environment.render()` gives, if that is a text, else the observation written.

    The rewards of all steps are summed. A reply that is no action costs a turn and `bad_action`, and is explained to
    the model. With `blocking` the game runs in threads: for one whose steps wait for something.
    """

    def __init__(
        self,
        name: str,
        split: str = "train",
        num_tasks: int = 1000,
        max_turns: int = 20,
        prompt: str | None = None,
        tag: str = "action",
        parse: str | None = None,
        render: str | None = None,
        bad_action: float = 0.0,
        blocking: bool = False,
        make: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self._seeds = seeds_of(split, num_tasks, seed)
        check_whole("max_turns", max_turns, 1)
        check_flag("blocking", blocking)
        self._make = _maker(name, make or {})
        self._max_turns = max_turns
        self._prompt = prompt if prompt is not None else TAGGED.format(tag=tag) if tag else ""
        self._tag = tag
        self._parse: Callable[..., Any] = import_argument("parse", parse) if parse else parsed
        self._render: Callable[..., str] = import_argument("render", render) if render else rendered
        self._bad_action = bad_action
        self._blocking = blocking

    def tasks(self) -> list[dict[str, Any]]:
        return [{"seed": seed} for seed in self._seeds]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        game = await self._aside(self._make)
        try:
            return [await self._play(game, task.data["seed"], context)]
        finally:
            if hasattr(game, "close"):
                await self._aside(game.close)

    async def _play(self, game: Any, seed: int, context: Context) -> Rollout:
        observation, info = await self._aside(partial(_reset, game, seed))
        first = [self._prompt, self._render(observation, info, game)]
        chat = Chat(context, "\n\n".join(part for part in first if part), max_turns=self._max_turns)
        total, bad = 0.0, 0
        while reply := await chat.reply():
            try:
                action = self._action(reply.text, game)
            except BadAction as error:
                bad += 1
                chat.say(str(error))
                continue
            step = await self._aside(partial(_step, game, action))
            observation, reward, terminated, truncated, info = step
            total += float(reward)
            if terminated or truncated:
                chat.stop("terminated" if terminated else "time_limit")
            else:
                chat.say(self._render(observation, info, game))
        rewards = {"reward": total, **({"bad_action": self._bad_action * bad} if self._bad_action else {})}
        return chat.rollout(rewards, {"turns": len(chat.turns), "bad_actions": bad})

    def _action(self, text: str, game: Any) -> Any:
        told = tagged(text, self._tag) if self._tag else text
        if told is None:
            raise BadAction(TAGGED.format(tag=self._tag))
        return self._parse(told.strip(), game)

    async def _aside(self, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function) if self._blocking else function()


def parsed(text: str, game: Any) -> Any:
    """The action that a text names: one of a `Discrete` space by its number, or the text itself."""
    space: Any = getattr(game, "action_space", None)
    if not (hasattr(space, "n") and hasattr(space, "start")):
        return text
    start, last = int(space.start), int(space.start + space.n) - 1
    if not (text.lstrip("-").isdecimal() and text.isascii() and len(text) < 20 and start <= int(text) <= last):
        raise BadAction(f"An action is a whole number from {start} to {last}.")
    return int(text)


def rendered(observation: Any, info: Any, game: Any) -> str:
    """What there is to see, in words."""
    if isinstance(observation, str):
        return observation
    drawn = game.render() if getattr(game, "render_mode", None) == "ansi" else None
    return _in_brackets(drawn) if isinstance(drawn, str) else str(observation)


def _in_brackets(drawn: str) -> str:
    """A terminal's colours as brackets: they mark where something is."""
    return _COLOUR.sub("[", drawn.replace(_PLAIN, "]")).strip("\n")


def _reset(game: Any, seed: int) -> Any:
    return _parts("reset", game.reset(seed=seed), 2, "(observation, info)")


def _step(game: Any, action: Any) -> Any:
    return _parts("step", game.step(action), 5, "(observation, reward, terminated, truncated, info)")


def _parts(method: str, returned: Any, count: int, wanted: str) -> Any:
    if not isinstance(returned, tuple) or len(returned) != count:
        raise EpisodeError("environment", f"{method}() must return {wanted}, not {returned!r:.200}", place=method)
    return returned


def _maker(name: str, make: dict[str, Any]) -> Callable[[], Any]:
    """What makes a game, each episode anew; checked now."""
    if ":" in name and not name.startswith("gymnasium"):
        return bound(imports.load(name, None), make, within="make.")
    gymnasium = library("gymnasium", "gymnasium")
    try:
        specification = gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise BadInput(f"unknown environment: {error}", value=f"gymnasium:{name}") from error
    drawn = {"render_mode": "ansi"} if _draws_text(specification) else {}
    return lambda: gymnasium.make(name, **{"disable_env_checker": True, **drawn, **make})


def _draws_text(specification: Any) -> bool:
    entry: Any = specification.entry_point
    kind = imports.load(entry, "environment") if isinstance(entry, str) else entry
    return "ansi" in getattr(kind, "metadata", {}).get("render_modes", ())
