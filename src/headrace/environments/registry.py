"""Environments by id, and registries of the plugins that a run file names: data providers, rewards and objectives.

An environment's id is the name of a shipped one, `library:name` for one of another library, or an import path.

A plugin is a class, constructed with the options of the run file, or a function to which they are bound. A shipped
plugin is registered by its module; its signature and docstring declare its options and its description. A user's plugin
is named by import path, `package.module:name`, or by file, `file.py:name`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, overload

from headrace import imports
from headrace.environments.arguments import BadArgument, bind_args
from headrace.environments.base import Environment
from headrace.errors import BadInput, suggest_similar
from headrace.imports import import_declarations

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
        others = ", ".join(f"{library}:NAME" for library in sorted(ADAPTERS))
        named = f"Known: {', '.join(sorted(SHIPPED))}; those of other libraries are named {others}; "
        named += "your own by import path, package.module:Class."
        fix = suggest_similar(identifier, SHIPPED, named)
        raise EnvironmentNotFound("unknown environment", key=key, value=identifier, fix=fix)
    kind = imports.load(location, key)
    try:
        environment = bind_args(kind, args, first_args)()
    except BadArgument as error:
        args_key = f"{key.rpartition('.')[0]}.args".removeprefix(".")
        problems = []
        for bad in error.problems:
            fact = f"{bad.fact} (environment {identifier})"
            place = args_key if bad.key is None else f"{args_key}.{bad.key}"
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


Plugin = TypeVar("Plugin", bound=Callable[..., Any])


class PluginRegistry:
    """Plugins of one kind by name.

    `what` names the kind in error messages. `module` has the shipped plugins; it is imported at the first look-up, and
    all modules of a package. `call_arguments` returns how many arguments a plugin function takes before its options.
    """

    def __init__(
        self, what: str, module: str = "", call_arguments: Callable[[Callable[..., Any]], int] = lambda plugin: 0
    ) -> None:
        self.what = what
        self._module = module
        self._call_arguments = call_arguments
        self._plugins: dict[str, Callable[..., Any]] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._load_plugins())

    def register(self, plugin: Plugin, name: str | None = None) -> Plugin:
        name = plugin.__name__ if name is None else name
        if not name or ":" in name:
            raise BadInput("a name without a colon is required", key=self.what, value=name)
        registered = self._plugins.get(name)
        if registered is not None and _location(registered) != _location(plugin):  # a module may be loaded again
            fix = f"Give {_location(plugin)} another name."
            raise BadInput(f"already registered by {_location(registered)}", key=self.what, value=name, fix=fix)
        self._plugins[name] = plugin
        return plugin

    @overload
    def decorator(self, plugin: str) -> Callable[[Plugin], Plugin]: ...

    @overload
    def decorator(self, plugin: Plugin) -> Plugin: ...

    def decorator(self, plugin: Any) -> Any:
        """Register the decorated plugin: `@register`, or `@register("name")`."""
        return functools.partial(self.register, name=plugin) if isinstance(plugin, str) else self.register(plugin)

    def find(self, name: str) -> Callable[..., Any]:
        """Return a plugin by its registered name, import path or file."""
        plugins = self._load_plugins()
        if name in plugins:
            return plugins[name]
        if ":" not in name:
            fix = f"Known: {', '.join(_nearest_first(name, plugins))}; your own by import path, package.module:Name, "
            raise BadInput(f"unknown {self.what}", value=name, fix=f"{fix}or by file, path/to/file.py:Name.")
        plugin = imports.load(name, self.what)
        if not callable(plugin):
            raise BadInput(f"a {type(plugin).__name__}, not a class or a function", key=self.what, value=name)
        return cast(Callable[..., Any], plugin)

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the parameters of a plugin that a run file may set."""
        plugin = self.find(name)
        parameters = inspect.signature(plugin).parameters
        skipped = 0 if isinstance(plugin, type) else self._call_arguments(plugin)
        return dict(list(parameters.items())[skipped:])

    def description(self, name: str) -> str:
        """Return the first line of a plugin's docstring."""
        return (inspect.getdoc(self.find(name)) or "").partition("\n")[0]

    def bind(self, name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
        """Check the names of the options and return the plugin with them bound, without calling it."""
        plugin, parameters = self.find(name), self.options(name)
        accepted = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            for unknown in (option for option in options if option not in accepted):
                fix = f"It takes {', '.join(_nearest_first(unknown, accepted)) or 'none'}."
                raise BadInput(f"{self.what} {name!r} has no such kwarg", key=unknown, fix=fix)
        for option in accepted:
            if parameters[option].default is inspect.Parameter.empty and option not in options:
                raise BadInput(f"{self.what} {name!r} needs this kwarg, and it is not set", key=option)
        partial = functools.partial(plugin, **options)
        if not isinstance(plugin, type):
            vars(partial).update(vars(plugin))
        return partial

    def construct(self, name: str, options: Mapping[str, Any]) -> Any:
        """Return an instance of a plugin class, or what a plugin function returns."""
        make = self.bind(name, options)
        try:
            return make()
        except BadArgument as error:
            what = f"{self.what} {name!r}"
            fact = f"{what} does not take these kwargs: {error}" if error.key is None else f"{what}: {error.fact}"
            raise BadInput(fact, key=error.key, value=error.value, fix=error.fix) from error

    def _load_plugins(self) -> dict[str, Callable[..., Any]]:
        """Return all registered plugins, after importing the module of the shipped ones."""
        if self._module:
            module, self._module = importlib.import_module(self._module), ""
            import_declarations(module)
        return self._plugins


def _nearest_first(name: str, names: Any) -> list[str]:
    return sorted(names, key=lambda other: (-difflib.SequenceMatcher(None, name, other).ratio(), other))


def _location(plugin: Callable[..., Any]) -> str:
    return f"{plugin.__module__}:{plugin.__qualname__}"
