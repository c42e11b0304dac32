"""Environments by id: the name of a shipped one, `library:name` for one of another library, or the import path
`package.module:Class`."""

from __future__ import annotations

import difflib
from typing import Any

from headrace import imports
from headrace.environments.arguments import BadArgument, bound
from headrace.environments.base import Environment
from headrace.errors import BadInput

SHIPPED = {
    "agent": "headrace.environments.agents.program:AgentProgram",
    "alphabet-sort": "headrace.environments.shipped.alphabet_sort:AlphabetSort",
    "arithmetic": "headrace.environments.shipped.arithmetic:Arithmetic",
    "calculator": "headrace.environments.shipped.calculator:Calculator",
    "copy": "headrace.environments.shipped.reverse_text:Copying",
    "countdown": "headrace.environments.shipped.countdown:Countdown",
    "file-search": "headrace.environments.shipped.file_search:FileSearch",
    "guess-number": "headrace.environments.shipped.guess_number:GuessNumber",
    "gsm8k": "headrace.environments.shipped.word_problems:Gsm8k",
    "hackable": "headrace.environments.hackable.environment:Hackable",
    "kuhn-poker": "headrace.environments.shipped.kuhn_poker:KuhnPoker",
    "math": "headrace.environments.shipped.word_problems:Math",
    "proposer-solver": "headrace.environments.shipped.proposer_solver:ProposerSolver",
    "reverse-text": "headrace.environments.shipped.reverse_text:ReverseText",
    "strict-math": "headrace.environments.shipped.word_problems:StrictMath",
    "wordle": "headrace.environments.shipped.wordle:Wordle",
}
ADAPTERS = {
    "gymnasium": "headrace.environments.adapters.gymnasium:GymnasiumText",
    "reasoning-gym": "headrace.environments.adapters.reasoning_gym:ReasoningGym",
    "textarena": "headrace.environments.adapters.textarena:TextArena",
    "verifiers": "headrace.environments.adapters.verifiers:VerifiersTaskset",
}
"""By library, the class that adapts its environments: the name is the first argument, `args` are the others."""


class EnvironmentNotFound(BadInput):
    """An unknown environment id, or args that the environment does not take."""


def location_of(identifier: str) -> tuple[str, list[str]]:
    """Return the import path of an id, and the adapter's first argument for environments of other libraries."""
    library, separator, name = identifier.partition(":")
    if separator and library in ADAPTERS:
        return ADAPTERS[library], [name]
    return SHIPPED.get(identifier, identifier), []


def load_environment(identifier: str, args: dict[str, Any], key: str = "environment") -> Environment:
    """Construct an environment from its id and args. Exceptions of its own code are not wrapped.

    `key` is the run file's key of the id, for errors; the key of `args` is derived from it.
    """
    location, first_args = location_of(identifier)
    if ":" not in location:
        close = difflib.get_close_matches(identifier, SHIPPED, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        others = ", ".join(f"{library}:NAME" for library in sorted(ADAPTERS))
        fix = f"{hint}Known: {', '.join(sorted(SHIPPED))}; those of other libraries are named {others}; "
        fix += "your own by import path, package.module:Class."
        raise EnvironmentNotFound("unknown environment", key=key, value=identifier, fix=fix)
    kind = imports.load(location, key)
    try:
        environment = bound(kind, args, first_args)()
    except BadArgument as error:
        args_key = f"{key.rpartition('.')[0]}.args".removeprefix(".")
        problems = []
        for bad in error.problems:
            fact, place = (
                f"{bad.fact} (environment {identifier})",
                args_key if bad.key is None else f"{args_key}.{bad.key}",
            )
            problems.append(EnvironmentNotFound(fact, key=place, value=bad.value, fix=bad.fix))
        raise EnvironmentNotFound.combine(problems) from error
    except BadInput as error:
        if error.key is None and error.file is None:
            error.key, error.value = key, identifier if error.value is None else error.value
        raise
    if not isinstance(environment, Environment):
        fact = "not a subclass of headrace.environments.base.Environment"
        raise EnvironmentNotFound(fact, key=key, value=identifier)
    return environment
