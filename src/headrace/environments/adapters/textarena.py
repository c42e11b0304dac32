"""Games of textarena: `id = "textarena:TicTacToe-v0"`.

Games for one player, and games for two: the policy plays both seats, each its own rollout, or one of them against an
opponent that is not trained. A message to a seat has what the game shows it since its last move, so that a whole game
stays one sample; textarena's observation wrappers, which repeat the history in every prompt, are bypassed. Left out:
games for three and more, and everything online.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from headrace.environments.adapters import import_library
from headrace.environments.arguments import BadArgument, check_whole, import_argument
from headrace.environments.base import Context, Environment, EpisodeError
from headrace.environments.chat import Chat
from headrace.environments.fault import fault_of
from headrace.environments.shipped.common import seeds_of
from headrace.errors import BadInput
from headrace.rollout.types import Rollout, Task

log = logging.getLogger(__name__)

RANDOM = "random"
FORFEIT = -1.0
"""Reward of a seat without a move: that of textarena for an invalid move."""
MOVE = re.compile(r"\[[\w+-][^\[\]\n]{0,39}\]")
MAX_PROBLEM_CHARACTERS = 300
NO_NEW_TEXT = "It is your turn."

Opponent = Callable[[str, random.Random], str]


@dataclass(eq=False)
class TextArena(Environment):
    """A textarena game; the tasks are `num_tasks` seeds, `make` has the arguments of the game.

    `max_turns` limits the moves of a seat. `opponent` plays the other seat of a game for two, the policy's seat being
    the seed's parity: "random", which takes any of the moves in brackets that it was shown last, or the import path of
    a function of (text, rng) that returns a move. Unset: the policy plays both, as `player_0` and `player_1`, each with
    its own reward.

    A seat without a move (the reply was truncated, the context is full, `max_turns` are over, the game raises on the
    reply) loses the game.
    """

    name: str
    split: str = "train"
    num_tasks: int = 1000
    max_turns: int = 100
    opponent: str | None = None
    make: dict[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._seeds = seeds_of(self.split, self.num_tasks, self.seed)
        check_whole("max_turns", self.max_turns, 1)
        self._textarena = import_library("textarena", "textarena")
        self._seats = _count_seats(self._textarena, self.name, self.make or {})
        if self.opponent is not None and self._seats == 1:
            raise BadArgument("it is a game for one", key="opponent", value=self.opponent, fix="Leave opponent out.")
        self._opponent: Opponent | None = None
        if self.opponent is not None:
            self._opponent = random_move if self.opponent == RANDOM else import_argument("opponent", self.opponent)

    def tasks(self) -> list[dict[str, Any]]:
        return [{"seed": seed} for seed in self._seeds]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        seed: int = task.data["seed"]
        game = Game(self._textarena, self.name, self.make or {}, self._seats, seed)
        trained = [seed % 2] if self._opponent is not None else list(range(self._seats))
        names = ["policy"] if len(trained) == 1 else [f"player_{seat}" for seat in trained]
        players = zip(trained, names, strict=True)
        chats = {seat: Chat(context, max_turns=self.max_turns, agent=name) for seat, name in players}
        rng = random.Random(f"opponent-{seed}")
        over = False
        while not over:
            seat, text = game.observe()
            move = await self._move(chats.get(seat), text, rng)
            over = move is None or game.play(move)
            if move is None:
                game.forfeited = seat
        outcomes = game.outcomes()
        return [
            chat.rollout({"reward": outcomes[seat]}, {"turns": len(chat.turns), **game.metrics(seat)})
            for seat, chat in chats.items()
            if chat.turns
        ]

    async def _move(self, chat: Chat | None, text: str, rng: random.Random) -> str | None:
        """Return the move of the policy or of the opponent; None if there is none."""
        if chat is None:
            assert self._opponent is not None, "a seat without a chat is the opponent's"
            return self._opponent(text, rng)
        chat.say(text)
        reply = await chat.reply()
        return None if reply is None or reply.truncated else reply.text


class Game:
    """One game with its own random state: textarena uses the global one of the process."""

    def __init__(self, textarena: ModuleType, name: str, args: dict[str, Any], seats: int, seed: int) -> None:
        self._seats = seats
        self._random_states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
        self.forfeited: int | None = None
        """The seat that has lost without a move."""
        self._crashed = False
        with self._own_random_state():
            self._game = textarena.make(name, **args)
            self._game.reset(num_players=seats, seed=seed % 2**32)
        self._inside = self._game
        while isinstance(self._inside, textarena.Wrapper):
            self._inside = self._inside.env
        self.is_for_one = isinstance(self._inside.state, textarena.SinglePlayerState)
        self._own_move = textarena.ObservationType.PLAYER_ACTION

    def observe(self) -> tuple[int, str]:
        """Return the seat to act and the text that is new to it, without its own moves."""
        with self._own_random_state():
            seat, observations = self._inside.get_observation()
        roles = self._inside.state.role_mapping
        texts = []
        for sender, *rest in observations:
            if sender == seat and self._own_move in rest:
                continue
            text = next((part for part in rest if isinstance(part, str)), "")  # some games mix up the order
            is_player = isinstance(sender, int) and sender >= 0
            texts.append(f"[{roles.get(sender, f'Player {sender}')}] {text}" if is_player else text)
        if seat not in range(self._seats):
            raise EpisodeError("environment", f"the seat to act is {seat!r}, which is not in the game", place="no seat")
        return seat, "\n".join(texts).strip("\n") or NO_NEW_TEXT

    def play(self, move: str) -> bool:
        """Return whether the game is over after this move. A move on which the game raises is forfeited."""
        seat = self._inside.state.current_player_id
        try:
            with self._own_random_state():
                over, _ = self._game.step(action=move)
        except Exception as error:
            log.info("%s failed on the move %r: %s", type(self._inside).__name__, move[:200], fault_of(error).text)
            self._crashed = True
            self.forfeited = seat
            return True
        return bool(over)

    def outcomes(self) -> dict[int, float]:
        """Return the reward of each seat. Some games have a text in place of a number for an invalid move."""
        if self.forfeited is not None:
            return {seat: FORFEIT if seat == self.forfeited else -FORFEIT for seat in range(self._seats)}
        rewards, _ = self._game.close()
        if rewards is None:
            raise EpisodeError("environment", "the game ended without an outcome", place="no outcome")
        by_seat = {seat: rewards.get(seat, 0.0) for seat in range(self._seats)}
        return {seat: FORFEIT if isinstance(reward, str) else float(reward) for seat, reward in by_seat.items()}

    @contextlib.contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """Replace the global random states by the game's own while it computes."""
        outer = random.getstate(), np.random.get_state()
        self._set_random_states(*self._random_states)
        try:
            yield
        finally:
            self._random_states = random.getstate(), np.random.get_state()
            self._set_random_states(*outer)

    @staticmethod
    def _set_random_states(plain: Any, of_numpy: Any) -> None:
        random.setstate(plain)
        np.random.set_state(of_numpy)

    def metrics(self, seat: int) -> dict[str, float]:
        invalid = bool(self._inside.state.game_info.get(seat, {}).get("invalid_move"))
        flags = {"invalid_move": invalid, "forfeited": self.forfeited == seat, "game_crashed": self._crashed}
        return {name: float(flag) for name, flag in flags.items()}


def random_move(text: str, rng: random.Random) -> str:
    """Return one of the moves in brackets in the last paragraph that has any."""
    for paragraph in reversed(text.split("\n\n")):
        if moves := MOVE.findall(paragraph):
            return str(rng.choice(moves))
    text = f'this game shows no moves in brackets; set opponent to a function of your own, not "{RANDOM}"'
    raise EpisodeError("no_random_move", text, place="random_move")


def _count_seats(textarena: ModuleType, name: str, args: dict[str, Any]) -> int:
    """Return the number of players by starting a game, which also checks that it can be played here."""
    if name not in textarena.envs.registration.ENV_REGISTRY:
        fix = "textarena.pprint_registry_detailed() lists the games."
        raise BadInput("unknown game", value=f"textarena:{name}", fix=fix)
    problem: Exception | None = None
    for seats in (1, 2):
        try:
            game = Game(textarena, name, args, seats, seed=0)
            game.observe()
        except Exception as error:  # textarena also raises for a wrong number of players
            problem = error
        else:
            if game.is_for_one == (seats == 1):
                return seats
    reason = "it takes other numbers of players" if problem is None else fault_of(problem).text
    reason = " ".join(reason.replace("*", " ").split())[:MAX_PROBLEM_CHARACTERS].rstrip(".")
    fact = f"cannot be played here, by one or by two: {reason}"
    fix = (
        "Choose another game. Some fetch word lists, call other models, are for more than two, or need a newer Python."
    )
    raise BadInput(fact, value=f"textarena:{name}", fix=fix) from problem
