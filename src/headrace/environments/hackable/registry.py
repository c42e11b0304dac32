"""Plugins by name: data providers, rewards and objectives, those that ship and a user's own.

A plugin is a class, which is constructed with the `kwargs` of the config, or a function, to which they are bound.
`package.module:Name` stands for one that is not registered, wherever a name does. Left out: finding plugins by
searching folders or entry points; whoever names one by its path needs neither.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, overload

from headrace import imports
from headrace.environments.arguments import BadArgument
from headrace.environments.hackable.objective import Objective
from headrace.environments.hackable.samples import TrainingSample
from headrace.errors import BadInput

Plugin = TypeVar("Plugin", bound=Callable[..., Any])
IN_ORDER = "in_order"


class Reward(Protocol):
    """One number for each completion of a flat batch of whole groups, or an awaitable of them.

    One that says that it is `bounded` has time limits of its own. One that holds something has an `async close()`;
    what it counts is in `counts`, by name.
    """

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[str],
        infos: Sequence[Mapping[str, Any]],
        /,
    ) -> Sequence[float] | Awaitable[Sequence[float]]: ...


class Registry:
    """`what` its plugins are is for messages; `arguments` is how many a function gets before its kwargs."""

    def __init__(self, what: str, arguments: int) -> None:
        self.what = what
        self.arguments = arguments
        self._plugins: dict[str, Callable[..., Any]] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._plugins)

    def register(self, plugin: Plugin, name: str | None = None) -> Plugin:
        named = plugin.__name__ if name is None else name
        if not named or ":" in named:
            raise BadInput("a name has no colon, which is for import paths", key=self.what, value=named)
        known = self._plugins.get(named)
        if known is not None and _place(known) != _place(plugin):  # a module may be loaded again
            fix = f"Give {_place(plugin)} another name."
            raise BadInput(f"the name of {_place(known)}", key=self.what, value=named, fix=fix)
        self._plugins[named] = plugin
        return plugin

    def bound(self, name: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """The plugin with its kwargs, which are checked; nothing of it is called yet."""
        plugin = self.find(name)
        _check_kwargs(plugin, 0 if isinstance(plugin, type) else self.arguments, kwargs, f"{self.what} {name!r}")
        return functools.partial(plugin, **kwargs)

    def find(self, name: str) -> Callable[..., Any]:
        if name in self._plugins:
            return self._plugins[name]
        if ":" not in name:
            nearest = sorted(self._plugins, key=lambda known: (-_likeness(name, known), known))
            raise BadInput(
                f"unknown {self.what}",
                value=name,
                fix=f"Known: {', '.join(nearest)}; your own by import path, package.module:Name.",
            )
        plugin = imports.load(name, self.what)
        if not callable(plugin):
            raise BadInput(f"a {type(plugin).__name__}, not a class or a function", key=self.what, value=name)
        return cast(Callable[..., Any], plugin)


DATA_PROVIDERS = Registry("data provider", 0)
REWARDS = Registry("reward", 4)
OBJECTIVES = Registry("objective", 0)


class _Register(Protocol):
    """`@register`, or `@register("a name of its own")`."""

    @overload
    def __call__(self, given: str) -> Callable[[Plugin], Plugin]: ...

    @overload
    def __call__(self, given: Plugin) -> Plugin: ...


def _decorator(registry: Registry) -> _Register:
    def register(given: Any) -> Any:
        if isinstance(given, str):
            return functools.partial(registry.register, name=given)
        return registry.register(given)

    return register


register_data_provider = _decorator(DATA_PROVIDERS)
register_reward = _decorator(REWARDS)
register_objective = _decorator(OBJECTIVES)


def in_order(provider: Plugin) -> Plugin:
    """Declare that the order of its samples matters: a run draws them as they come, instead of shuffling them."""
    setattr(provider, IN_ORDER, True)
    return provider


def is_in_order(name: str) -> bool:
    """Whether the provider of this name declares its order."""
    return bool(getattr(DATA_PROVIDERS.find(name), IN_ORDER, False))


class DataProvider:
    """Samples that can be gone through again and again, always the same ones."""

    def __init__(self, name: str, make: Callable[[], Iterable[TrainingSample]]) -> None:
        self.name = name
        self._make = make

    def __iter__(self) -> Iterator[TrainingSample]:
        made: Any = self._make()
        if not isinstance(made, Iterable):
            fact = f"it gives a {type(made).__name__}, not samples one after another"
            raise BadInput(fact, key="data provider", value=self.name)
        for number, sample in enumerate(made):
            if not isinstance(sample, TrainingSample):
                fact = f"sample {number} is a {type(sample).__name__}, not a TrainingSample"
                raise BadInput(fact, key="data provider", value=self.name)
            yield sample


def build_data_provider(name: str, kwargs: Mapping[str, Any] | None = None, seed: int = 0) -> DataProvider:
    """`seed` is handed to a provider that takes one, unless its kwargs have another."""
    given = dict(kwargs or {})
    if "seed" in inspect.signature(DATA_PROVIDERS.find(name)).parameters:
        given.setdefault("seed", seed)
    return DataProvider(name, DATA_PROVIDERS.bound(name, given))


def build_reward(name: str, kwargs: Mapping[str, Any] | None = None) -> Reward:
    bound = REWARDS.bound(name, kwargs or {})
    reward = _constructed(bound, f"reward {name!r}") if isinstance(REWARDS.find(name), type) else bound
    if not callable(reward):
        fix = "Give its class __call__(self, prompts, completions, answers, infos)."
        raise BadInput("it cannot be called", key="reward", value=name, fix=fix)
    return cast(Reward, reward)


def build_objective(name: str, kwargs: Mapping[str, Any] | None = None) -> Objective:
    objective = _constructed(OBJECTIVES.bound(name, kwargs or {}), f"objective {name!r}")
    if not isinstance(objective, Objective):
        raise BadInput("it is not a subclass of headrace.environments.hackable.Objective", key="objective", value=name)
    return objective


def build_rewards(names: Iterable[str], kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Reward]:
    """The rewards of an objective, each with its own kwargs. Those of a known reward that is not asked for are idle."""
    asked = list(names)
    given = kwargs_by_reward(asked, kwargs or {})
    for name in given:
        if name not in asked:
            REWARDS.find(name)
    return {name: build_reward(name, given.get(name)) for name in asked}


def kwargs_by_reward(names: Sequence[str], kwargs: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return kwargs by the name of the reward that they are for: a reward given by path may be named by its last part.

    Kwargs of other rewards stay under their name.
    """
    matched: dict[str, Mapping[str, Any]] = {}
    for key, own in kwargs.items():
        paths = [] if key in names else [name for name in names if name.rpartition(":")[2] == key]
        if len(paths) > 1:
            raise BadInput(f"the last part of {' and of '.join(paths)}", key=key, fix="Write the whole path.")
        name = paths[0] if paths else key
        if name in matched:
            raise BadInput(
                f"the same reward as {name}, whose kwargs are given, too", key=key, fix="Give one of the two."
            )
        matched[name] = own
    return matched


def _constructed(make: Callable[[], Any], what: str) -> Any:
    try:
        return make()
    except BadArgument as error:
        fact = f"{what} does not take these kwargs: {error}" if error.key is None else f"{what}: {error.fact}"
        raise BadInput(fact, key=error.key, value=error.value, fix=error.fix) from error


def _check_kwargs(plugin: Callable[..., Any], arguments: int, kwargs: Mapping[str, Any], what: str) -> None:
    """Refuse kwargs that it does not have, and the absence of those that it needs, by name."""
    signature = inspect.signature(plugin)
    parameters = list(signature.parameters.values())
    known = [p.name for p in parameters[arguments:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_any else [name for name in kwargs if name not in known]
    if unknown:
        nearest = sorted(known, key=lambda name: (-_likeness(unknown[0], name), name))
        raise BadInput(f"{what} has no such kwarg", key=unknown[0], fix=f"It takes {', '.join(nearest) or 'none'}.")
    needed = [name for name in known if signature.parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in kwargs]:
        raise BadInput(f"{what} needs this kwarg, and it is not set", key=missing[0])


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _place(plugin: Callable[..., Any]) -> str:
    return f"{plugin.__module__}:{plugin.__qualname__}"
