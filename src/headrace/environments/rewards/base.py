"""The reward protocol, and rewards by name, by import path (`package.module:name`) or by file (`path/to/file.py:name`).

A reward is a function of one completion: it takes the completion's text and the task's data, and returns a number.
A group reward (`@group_reward`) takes the texts and the data of all completions of a group and returns a number for
each. A batch reward, the hackable layer's `reward(prompts, completions, answers, infos)`, is called as a group reward
with the columns of its rows; so is TRL's `reward(completions, **columns)`, by keyword. All may be asynchronous, or
objects with `__call__`. Optional attributes of a reward:

    name           the name of its scores, where a list of rewards gives none
    bounded        true if it needs no time limit: it has its own, or takes time in proportion to the text
    counts         a dict of what it counts: timeouts, failures, ...
    async close()  releases its processes and connections

Left out: weights. Rewards are summed as they are; `scaled` multiplies one by a factor. A shipped reward is registered
by a module of this folder: its signature declares the options, its docstring the description, its constructor the
checks.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from headrace.environments.arguments import BadArgument, check_choice
from headrace.environments.registry import PluginRegistry
from headrace.environments.sandbox import WALL_FACTOR, CallFailed, CallTimeout, Sandbox
from headrace.environments.strict_format import format_of
from headrace.errors import BadInput, suggest_similar

log = logging.getLogger(__name__)

Data = Mapping[str, Any]
Scores = Sequence[float]
Form = Literal["completion", "group", "batch", "columns"]
Function = TypeVar("Function", bound=Callable[..., Any])


class Reward(Protocol):
    """A reward of one completion: `text` is what the model answered, `data` the task's row with the gold answer."""

    def __call__(self, text: str, data: Data, /) -> float | Awaitable[float]: ...


class GroupReward(Protocol):
    """A reward of the completions of a group, or of several groups in a row: one number for each."""

    def __call__(self, texts: Sequence[str], data: Sequence[Data], /) -> Scores | Awaitable[Scores]: ...


AnyReward = Reward | GroupReward | Callable[..., Any]
"""A reward in any of its forms."""


def group_reward(reward: Function) -> Function:
    """Declare that a function or class scores a whole group at once."""
    reward.form = "group"  # type: ignore[attr-defined]
    return reward


def form_of(reward: AnyReward) -> Form:
    """Return how a reward is called: with one completion, with a group, or with columns, by position or by keyword."""
    if (form := getattr(reward, "form", None)) is not None:
        return form  # type: ignore[no-any-return]
    try:
        named = inspect.signature(reward).parameters
    except ValueError:  # a builtin without a signature
        return "completion"
    parameters = named.values()
    if "completions" in named and "infos" not in named and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return "columns"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    return "batch" if len(required) >= 4 or (positional and positional[0].name == "prompts") else "completion"


class SampleData(dict[str, Any]):
    """The data of a sample as rewards see it: the entries of its `info`, and its `prompt` and `answer`."""

    def __init__(self, prompt: str, answer: str, info: Data) -> None:
        super().__init__({**info, "prompt": prompt, "answer": answer})
        self.info = info


def batch_arguments(texts: Sequence[str], data: Sequence[Data]) -> tuple[list[Any], ...]:
    """Return prompts, completions, answers and infos. For the row of an environment, `info` is the whole row."""
    prompts, answers = ([str(row.get(name, "")) for row in data] for name in ("prompt", "answer"))
    return prompts, list(texts), answers, [getattr(row, "info", row) for row in data]


def keyword_columns(texts: Sequence[str], data: Sequence[Data]) -> dict[str, list[Any]]:
    """Return `prompts`, `completions` and the other columns of the rows, as TRL passes them.

    Where the data has conversations for prompts, a completion is a conversation, too: the assistant's message.
    """
    rows = [getattr(row, "info", row) for row in data]
    prompts = [own.get("prompt", row.get("prompt", "")) for own, row in zip(rows, data, strict=True)]
    names = dict.fromkeys(name for row in data for name in row if name != "prompt")
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    columns = {name: [row.get(name) for row in data] for name in names}
    return {**columns, "prompts": prompts, "completions": completions}


class Counts(dict[str, int]):
    """Counters of a reward. Each has a description that is logged at the first count and whenever it has doubled."""

    def __init__(self, reward: str, **descriptions: str) -> None:
        super().__init__(dict.fromkeys(descriptions, 0))
        self._reward = reward
        self._descriptions = descriptions

    def add(self, name: str) -> None:
        self[name] += 1
        if self[name] & (self[name] - 1) == 0:
            log.warning("reward %r: %s: %d so far in this process", self._reward, self._descriptions[name], self[name])


class SandboxReward:
    """Base of rewards that check an answer in processes which can be killed.

    A check that exceeds `timeout` seconds of processor time, or fails, counts against the answer where `counts` has a
    counter for that; otherwise it raises, as it does if no process can be started.
    """

    name: str
    bounded = True
    timeout_counter = "timeouts"
    failure_counter = "failures"

    def __init__(
        self, timeout: float, processes: int, counts: Counts, *, untrusted: bool = False, modules: Sequence[str] = ()
    ) -> None:
        self.counts = counts
        self._timeout = timeout
        self._sandbox = Sandbox(processes, untrusted=untrusted, modules=modules)

    async def close(self) -> None:
        await self._sandbox.close()

    async def _check(self, function: str, *args: Any) -> Any:
        """Return what `package.module:name` returns; None after a counted timeout or failure."""
        try:
            return await self._sandbox.call(function, *args, timeout=self._timeout, wall_factor=WALL_FACTOR)
        except (CallTimeout, CallFailed) as error:
            counter = self.timeout_counter if isinstance(error, CallTimeout) else self.failure_counter
            if counter not in self.counts or (isinstance(error, CallFailed) and error.kind in ("start", "closed")):
                raise
            log.debug("reward %r: %s", self.name, error)
            self.counts.add(counter)
            return None


class _InSandbox(SandboxReward):
    def __init__(self, function: str, timeout: float, processes: int, untrusted: bool) -> None:
        module, _, self.name = function.partition(":")
        if not (module and self.name):
            raise BadInput("not an import path", key="function", value=function, fix="Write package.module:function.")
        super().__init__(timeout, processes, Counts(function), untrusted=untrusted, modules=[module])
        self._function = function

    async def __call__(self, text: str, data: Data) -> float:
        value: float = await self._check(self._function, text, dict(data))
        return value


def in_sandbox(function: str, timeout: float = 2.0, processes: int = 2, untrusted: bool = False) -> Reward:
    """Return a reward that calls a synchronous function, `package.module:name`, in processes that can be killed.

    Set `untrusted` if the function executes what the model wrote.
    """
    return _InSandbox(function, timeout, processes, untrusted)


class _Scaled:
    def __init__(self, reward: AnyReward, factor: float) -> None:
        self.name = name_of(reward)
        self.form = form_of(reward)
        self.bounded = getattr(reward, "bounded", False)
        self.counts = getattr(reward, "counts", {})
        self._reward: Callable[..., Any] = reward
        self._factor = factor

    def __call__(self, *args: Any, **columns: Any) -> Any:
        value = self._reward(*args, **columns)
        return self._scale_later(value) if inspect.isawaitable(value) else self._scale(value)

    async def _scale_later(self, value: Awaitable[Any]) -> Any:
        return self._scale(await value)

    def _scale(self, value: Any) -> Any:
        return self._factor * value if self.form == "completion" else [self._factor * score for score in value]

    async def close(self) -> None:
        await close_reward(self._reward)


def scaled(reward: AnyReward, factor: float) -> Reward:
    """Return a reward whose scores are multiplied by `factor`."""
    return _Scaled(reward, factor)


async def close_reward(reward: AnyReward) -> None:
    """Call a reward's `close`, if it has one."""
    if (close := getattr(reward, "close", None)) is not None:
        await close()


def gold_of(data: Data, field: str) -> Any:
    """Return the field of a task that a reward compares with."""
    if field not in data:
        raise LookupError(f"the task has no field {field!r}, only {', '.join(map(repr, data)) or 'none at all'}")
    return data[field]


def name_of(reward: AnyReward) -> str:
    """Return a reward's own name, or "" if it has none."""
    name = getattr(reward, "name", None) or getattr(reward, "__name__", None)
    return name if isinstance(name, str) else ""


def check_installed(reward: str, library: str, extra: str) -> None:
    """Raise `BadInput` if the optional library of a reward is not installed."""
    if importlib.util.find_spec(library) is None:
        fact, fix = f"the library {library} is not installed", f"Run pip install 'headrace[{extra}]'."
        raise BadInput(fact, key="reward", value=reward, fix=fix)


PARTS = ("all", "answer")
Options = Mapping[str, Any]
Kind = TypeVar("Kind", bound=type)


def _count_call_arguments(reward: Callable[..., Any]) -> int:
    """Return how many parameters of a reward are not options; TRL's form has no options."""
    form = form_of(reward)
    return len(inspect.signature(reward).parameters) if form == "columns" else 4 if form == "batch" else 2


REWARDS = PluginRegistry("reward", "headrace.environments.rewards", _count_call_arguments)
register_reward = REWARDS.decorator


def register_with_part(name: str) -> Callable[[Kind], Kind]:
    """Register a reward class with one more option, `part`.

    With `part = "answer"` the reward sees only the boxed answer of the strict format, and a malformed completion scores
    0. The decorated class itself stays as it is.
    """

    def register(kind: Kind) -> Kind:
        base: Any = kind

        class WithPart(base):  # type: ignore[misc]
            def __init__(self, *args: Any, part: str = "all", **kwargs: Any) -> None:
                check_choice("part", part, PARTS)
                super().__init__(*args, **kwargs)
                self._answer_only = part == "answer"

            def __call__(self, text: str, data: Data) -> Any:
                if self._answer_only:
                    parsed = format_of(data).parse(text)
                    if parsed is None:
                        return 0.0
                    text = parsed.answer
                return super().__call__(text, data)

        signature = inspect.signature(kind)
        part = inspect.Parameter("part", inspect.Parameter.KEYWORD_ONLY, default="all", annotation="str")
        WithPart.__signature__ = signature.replace(parameters=[*signature.parameters.values(), part])
        WithPart.__doc__, WithPart.__module__ = kind.__doc__, kind.__module__
        WithPart.__qualname__ = WithPart.__name__ = kind.__name__
        REWARDS.register(WithPart, name)
        return kind

    return register


def build_reward(name: str, options: Options | None = None) -> AnyReward:
    """Return a reward with its options: an instance of a class, or a function with the options bound."""
    is_class = isinstance(REWARDS.find(name), type)
    reward: Any = (REWARDS.construct if is_class else REWARDS.bind)(name, options or {})
    if not callable(reward):
        fix = "Give its class __call__(self, text, data)."
        raise BadInput("it cannot be called", key="reward", value=name, fix=fix)
    return reward  # type: ignore[no-any-return]


def build_rewards(names: Iterable[str], options: Mapping[str, Options] | None = None) -> dict[str, AnyReward]:
    """Return the rewards of an objective, each with its own options. Those of other known rewards have no effect."""
    used = list(names)
    matched = options_by_reward(used, options or {})
    for name in matched:
        if name not in used:
            REWARDS.find(name)
    return {name: build_reward(name, matched.get(name)) for name in used}


def options_by_reward(names: Sequence[str], options: Mapping[str, Options]) -> dict[str, Options]:
    """Return options by the name of their reward: a reward given by path may be named by its last part.

    Options of other rewards stay under their name.
    """
    matched: dict[str, Options] = {}
    for key, own in options.items():
        paths = [] if key in names else [name for name in names if name.rpartition(":")[2] == key]
        if len(paths) > 1:
            raise BadInput(f"the last part of {' and of '.join(paths)}", key=key, fix="Write the whole path.")
        name = paths[0] if paths else key
        if name in matched:
            fact = f"the same reward as {name}, whose kwargs are also set"
            raise BadInput(fact, key=key, fix="Set one of the two.")
        matched[name] = own
    return matched


TABLE_KEYS = "The keys are name, a text; kwargs, a table; weight, a number."


class RewardTable(msgspec.Struct):
    """A reward in a run file that needs more than its name."""

    name: str
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    weight: float = 1.0


def _read_table(value: Mapping[str, Any], key: str) -> RewardTable:
    for name, field in value.items():
        if name not in RewardTable.__struct_fields__:
            fix = suggest_similar(str(name), RewardTable.__struct_fields__, TABLE_KEYS)
            raise BadArgument("unknown key", key=f"{key}.{name}", value=field, fix=fix)
    try:
        return msgspec.convert(value, RewardTable)
    except msgspec.ValidationError as error:
        raise BadArgument(str(error), key=key, value=value, fix=TABLE_KEYS) from error


def resolve_reward(value: Any, key: str) -> AnyReward:
    """Return the reward that a value is, names, or describes as a table of `name`, `kwargs` and `weight`.

    `key` is where the value is set, for errors. A reward by name that has no name of its own gets the last part of it.
    """
    if isinstance(value, str | Mapping):
        table = RewardTable(value) if isinstance(value, str) else _read_table(value, key)
        try:
            reward = build_reward(table.name, table.kwargs)
        except BadInput as error:
            place = key if error.key in (None, "reward") else f"{key}.kwargs.{error.key}"
            raise BadArgument(error.fact, key=place, value=error.value, fix=error.fix) from error
        value = scaled(reward, table.weight) if table.weight != 1.0 else reward
        if not getattr(value, "name", ""):
            value.name = table.name.rpartition(":")[2]
    if not callable(value):
        raise BadArgument(f"a {type(value).__name__}, which cannot be called", key=key)
    return value  # type: ignore[no-any-return]
