"""What can be checked of a run before any process of it starts: without a GPU, without torch, in about a second.

`headrace rl` and `headrace sft` do this first, and with `--dry-run` nothing else. Every check yields its problems, and
all of them are reported together. A user's loss is looked for in its source and not imported, since it brings torch:
what its module raises when it is imported, the trainer reports.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from renderers.base import Renderer

from headrace.algorithms.declaration import declared
from headrace.algorithms.user_function import load_function
from headrace.config.orchestrator import EnvConfig
from headrace.config.sft import SftConfig, SftEvalConfig, SourceConfig
from headrace.environments.base import tasks_of
from headrace.environments.data.tables import DataNotHere
from headrace.environments.registry import load_environment
from headrace.errors import BadInput, InvalidValue
from headrace.launch.function_source import look_for
from headrace.launch.own_code import find_code_beside
from headrace.launch.prompt_lengths import (
    SAMPLED,
    NoQuestion,
    lost,
    opens_something,
    prompt_lengths,
    render_some,
)
from headrace.orchestrator import curricula
from headrace.orchestrator.filters.custom import CustomFilterConfig
from headrace.runfile.problems import filled_sources
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.text.hub import cached_model_directory, model_directory
from headrace.text.renderer import make_renderer
from headrace.text.sft_conversation import SftConversation
from headrace.text.tokenizer import shared_tokenizer
from headrace.trainer.losses.custom import CustomLossConfig
from headrace.trainer.sft_data import from_environment, sample_rows
from headrace.trainer.tiny import write_tiny_settings

SLOW_S = 2.0
"""Seconds after which it is said what is being loaded."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that count the experts of a layer."""


@dataclass
class Subject:
    """A run that is checked, and what was learned about it on the way."""

    config: RunConfig | SftConfig
    scratch: Path
    """A folder for files that are gone afterwards."""
    began_with: str | None = None
    """Of a run that is resumed: the model that it began with, whatever made that one."""
    trail: tuple[Path, ...] = ()
    """The SFT run files whose model this run is part of."""
    renderer: Renderer | None = None
    """Unset where the model is not on this machine yet."""
    model: Path | None = None
    downloads: bool = True
    """Whether data may be fetched to be checked."""
    lines: list[str] = field(default_factory=list)
    """Resolved lengths."""
    notices: list[str] = field(default_factory=list)
    """What is valid, and probably not meant."""

    @property
    def seq_len(self) -> int:
        assert self.config.seq_len is not None  # both kinds of run file require it
        return self.config.seq_len


Check = Callable[[Subject], Iterator[BadInput]]


def check_run(config: RunConfig | SftConfig, began_with: str | None = None, *, downloads: bool = True) -> Subject:
    """Check all that can be checked; raise `BadInput` with every problem, or return what was learned.

    Without `downloads`, what would have to be fetched first is not checked, and a notice says so. Where the user has
    turned the hub off, nothing could be fetched later either.
    """
    downloads = downloads or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "true", "yes")
    offline = nullcontext() if downloads else hub_offline()
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as scratch, offline:
        subject = Subject(config, Path(scratch), began_with, downloads=downloads)
        problems = [problem for check in CHECKS for problem in check(subject)]
    if problems:
        raise BadInput.combine(_each_once(problems, config.FILLED_FROM))
    return subject


def _each_once(problems: Sequence[BadInput], filled_from: Mapping[str, str]) -> list[BadInput]:
    """Leave out a problem of a key that has its value, and so the problem, from another."""
    once = {(problem.key, problem.fact): problem for problem in problems}
    return [
        problem
        for (key, fact), problem in once.items()
        if not any((source, fact) in once for source in filled_sources(key or "", filled_from))
    ]


def check_output_dir(subject: Subject) -> Iterator[BadInput]:
    """The directory is there, or can be made."""
    given = subject.config.output_dir
    if given is None:
        yield BadInput("not set", key="output_dir", fix="Say where the run keeps its files.")
        return
    there = next(path for path in (given.absolute(), *given.absolute().parents) if path.exists())
    if not there.is_dir():
        yield BadInput(f"{there} is a file", key="output_dir", value=given, fix="Choose another directory.")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield BadInput(f"{there} cannot be written to", key="output_dir", value=given, fix="Choose another directory.")


def check_model(subject: Subject) -> Iterator[BadInput]:
    """The model is there, with a tokenizer and a chat format; those of a start model are its base's."""
    config = subject.config
    try:
        subject.model = _local_model(subject)
        if subject.model is None:
            name = config.model.name
            subject.notices.append(f"{name} is not on this machine yet: prompts are measured once it has been fetched")
            return
        tokenizer = shared_tokenizer(subject.model)
    except BadInput as error:
        yield from _with_key(error, "model")
        return
    for key, section in _renderers(config):
        try:
            options = section.model_dump(exclude={"pool_size"})
            renderer = make_renderer(subject.model, tokenizer, **options)
            renderer.render_ids([{"role": "user", "content": "Hello."}], add_generation_prompt=True)
        except TemplateError:
            subject.renderer = subject.renderer or renderer  # it may want a conversation of another form
        except InvalidValue as error:
            error.key = f"{key}.{error.key}"
            yield error
        except BadInput as error:
            yield from _with_key(error, "model", config.model.name)
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            fact = f"the renderer does not fit the tokenizer of {subject.model}: {error}"
            yield BadInput(fact, key=f"{key}.name", value=section.name)
        else:
            subject.renderer = subject.renderer or renderer


def check_experts(subject: Subject) -> Iterator[BadInput]:
    """The embedded engine takes new weights by the names that they have in memory, where experts are fused.

    So the first update of a run with such a model would fail. vLLM takes them by the names that files have. What
    config.json does not show, the trainer refuses when it has loaded the model (`Publisher.check_embedded`).
    """
    config = subject.config
    publishes = isinstance(config, RunConfig) or config.evaluates
    if subject.model is None or not publishes or config.inference.loads_fused_experts:
        return
    settings = json.loads((subject.model / "config.json").read_text())
    for section in (settings, settings.get("text_config") or {}):
        if any(section.get(key) not in (None, 0, 1) for key in EXPERTS):  # some families have a list, by layer
            yield BadInput(
                f"{section.get('model_type', 'this model')} has experts, whose weights the embedded engine cannot "
                "take from the trainer",
                key="model.name",
                value=config.model.name,
                fix='Set inference.engine = "vllm", or choose a model without experts.',
            )
            return


def check_own_code(subject: Subject) -> Iterator[BadInput]:
    """Algorithms, samplers, gates and filters of the user's are there and take their kwargs."""
    if not isinstance(subject.config, RunConfig):
        return
    config = subject.config.orchestrator
    for number, env in enumerate(config.train.env):
        own = f"orchestrator.train.env.{number}"
        algo_key = "orchestrator.algo" if env.algo is None else f"{own}.algo"
        yield from _tried(algo_key, declared(config.algo_of(env)).check_imports)
        yield from _tried(f"{own}.curriculum", curricula.check_imports, config.curriculum_of(env))
    for slot in ("pre_batch_filters", "post_batch_filters"):
        for number, entry in enumerate(getattr(config, slot)):
            if isinstance(entry, CustomFilterConfig):
                key = f"orchestrator.{slot}.{number}.import_path"
                yield from _tried(key, load_function, entry.import_path, entry.kwargs, "filter")


def check_loss(subject: Subject) -> Iterator[BadInput]:
    """The source of a loss of the user's has the function, and it takes its kwargs."""
    if isinstance(subject.config, RunConfig) and isinstance(loss := subject.config.trainer.loss, CustomLossConfig):
        yield from _tried("trainer.loss.import_path", look_for, loss.import_path, loss.kwargs)


def check_completions(subject: Subject) -> Iterator[BadInput]:
    """`max_tokens` of a reply is within `seq_len`."""
    for key, entry, defaults, seq_len in _environments(subject.config):
        section, _, slot = key.partition(".env.")
        own = entry.sampling.max_tokens
        most = own if own is not None else defaults.max_tokens
        if most is not None and most > seq_len:
            place = f"{section}.env.{slot}.sampling" if own is not None else f"{section}.sampling"
            yield BadInput(
                f"more than seq_len = {seq_len}, which is of prompt and completion together",
                key=f"{place}.max_tokens",
                value=most,
                fix="Lower it, or raise seq_len.",
            )


def check_environments(subject: Subject) -> Iterator[BadInput]:
    """Environments can be made, have tasks, and prompts that leave room for a reply."""
    for key, entry, defaults, seq_len in _environments(subject.config):
        try:
            with saying(f"loading environment {entry.name}"):
                lengths = _lengths(subject, entry, f"{key}.id")
        except Exception as error:
            yield from _refusals(subject, error, f"{key}.id", entry.id)
            continue
        if lengths:
            sampling = entry.sampling.over(defaults)
            yield from _judge_prompts(subject, entry.name, lengths, seq_len, sampling.max_tokens)


def check_data(subject: Subject) -> Iterator[BadInput]:
    """Examples can be read, and have something to learn within `seq_len`."""
    if not isinstance(subject.config, SftConfig):
        return
    sources = {"data": subject.config.data, "validation": subject.config.validation}
    for key, source in sources.items():
        if source is None or (origin := next((o for o in ("path", "name", "env") if getattr(source, o)), None)) is None:
            continue
        name = f"{key}.{origin}"
        try:
            with saying(f"reading {name}"), closing(_examples(source, name, subject.config.seed)) as examples:
                yield from _judge_examples(subject, name, examples)
        except Exception as error:
            for problem in _refusals(subject, error, name, getattr(source, origin)):
                if problem.key and problem.key.startswith("columns."):
                    problem.key = f"{key}.{problem.key}"
                yield problem


CHECKS: tuple[Check, ...] = (
    check_output_dir,
    check_model,
    check_experts,
    check_own_code,
    check_loss,
    check_completions,
    check_environments,
    check_data,
)


def _local_model(subject: Subject) -> Path | None:
    """A directory with the model's settings, tokenizer and chat template; None where they must be fetched first."""
    if subject.began_with is not None:
        return model_directory(subject.began_with)
    model = subject.config.model
    if model.sft is not None:
        return _start_model(subject, model.sft)
    if model.init is not None:
        write_tiny_settings(subject.scratch / model.init)
        return subject.scratch / model.init
    if model.name is None:
        raise BadInput("not set", key="model", fix="Set model.name, model.init or model.sft.")
    return cached_model_directory(model.name, "model.name", fetch_later=not subject.downloads)


def _start_model(subject: Subject, file: Path) -> Path | None:
    """The base of the model that an SFT run file makes, once all else in that file has been checked, too."""
    if not file.is_file():
        raise BadInput("no such file", key="model.sft", value=file)
    if file.resolve() in subject.trail:
        raise BadInput("starts from itself", key="model.sft", value=file)
    find_code_beside([file])
    config, _ = load(SftConfig, [file])
    config = config.model_copy(update={"eval": SftEvalConfig()})
    start = Subject(config, subject.scratch, trail=(*subject.trail, file.resolve()), downloads=subject.downloads)
    problems = [problem for check in CHECKS if check is not check_output_dir for problem in check(start)]
    for problem in problems:
        problem.file = problem.file or file
    subject.lines += start.lines
    subject.notices += start.notices
    if problems:
        raise BadInput.combine(problems)
    return start.model


def _renderers(config: RunConfig | SftConfig) -> list[tuple[str, Any]]:
    """By section: the one that renders prompts first."""
    if isinstance(config, SftConfig):
        return [("renderer", config.renderer)]
    return [("orchestrator.renderer", config.orchestrator.renderer), ("inference.renderer", config.inference.renderer)]


def _environments(config: RunConfig | SftConfig) -> list[tuple[str, EnvConfig, Any, int]]:
    """Every environment with its key, the sampling that it inherits, and the longest conversation."""
    if isinstance(config, RunConfig):
        sections, seq_len = config.orchestrator, config.seq_len
        slots: list[tuple[str, Any]] = [("orchestrator.train", sections.train), ("orchestrator.eval", sections.eval)]
    else:
        slots, seq_len = [("eval", config.eval)], config.inference.max_model_len or config.seq_len
    assert seq_len is not None
    return [
        (f"{key}.env.{number}", env, slot.sampling, seq_len)
        for key, slot in slots
        for number, env in enumerate(slot.env)
    ]


def _lengths(subject: Subject, entry: EnvConfig, key: str) -> list[int]:
    """Return the tokens of an environment's prompts; none where they cannot be measured."""
    args = dict(entry.args)
    if entry.id == "hackable" and subject.model is not None:
        args.setdefault("tokenizer_name", str(subject.model))
    environment = load_environment(entry.id, args, key)
    tasks = tasks_of(environment, entry.name, key)
    if subject.renderer is None:
        return []
    if opens_something(environment):
        subject.notices.append(f"prompts of {entry.name} are not measured: its episodes need what start() opens")
        return []
    try:
        return prompt_lengths(environment, tasks, subject.renderer)
    except NoQuestion as error:
        subject.notices.append(f"prompts of {entry.name} are not measured: {error}")
        return []


def _judge_prompts(
    subject: Subject, name: str, lengths: Sequence[int], seq_len: int, max_tokens: int | None
) -> Iterator[BadInput]:
    shortest, longest, count = min(lengths), max(lengths), len(lengths)
    if shortest >= seq_len:
        yield BadInput(
            f"the shortest of {count} prompts of {name} has {shortest} tokens, the longest {longest}",
            key="seq_len",
            value=seq_len,
            fix=f"Raise seq_len to at least {longest + (max_tokens or 1)}.",
        )
        return
    if longest >= seq_len:
        too_long = sum(length >= seq_len for length in lengths)
        subject.notices.append(
            f"{too_long} of {count} sampled prompts of {name} do not fit into seq_len = {seq_len}, and their episodes "
            f"will fail: the longest has {longest} tokens"
        )
    room = seq_len - min(longest, seq_len - 1)
    most = room if max_tokens is None else min(room, max_tokens)
    subject.lines.append(
        f"prompts of {name}: {shortest} to {longest} tokens ({count} sampled), completions up to {most}"
    )


def _examples(source: SourceConfig, key: str, seed: int) -> Generator[SftConversation, None, None]:
    """Some of a source's examples; none where they would have to be fetched."""
    if source.env is not None:
        yield from islice(from_environment(load_environment(source.env, source.args, key), seed, 0), SAMPLED)
    elif source.path is not None:
        yield from sample_rows(source.path, source.columns.model_dump(exclude_none=True), SAMPLED)


def _judge_examples(subject: Subject, key: str, examples: Iterator[SftConversation]) -> Iterator[BadInput]:
    if subject.renderer is None:
        next(examples, None)  # the first is read and checked all the same
        return
    samples = render_some(examples, subject.renderer)
    if not samples:
        return
    lengths = [len(sample) for sample in samples]
    shortest, longest, count = min(lengths), max(lengths), len(lengths)
    empty = len(list(lost(samples, subject.seq_len)))
    if empty == count:
        yield BadInput(
            f"nothing is left to learn of {count} examples of {key}, which have {shortest} to {longest} tokens",
            key="seq_len",
            value=subject.seq_len,
            fix=f"Raise seq_len to at least {longest}.",
        )
        return
    if empty:
        subject.notices.append(
            f"of {empty} of {count} sampled examples of {key} nothing is left to learn within seq_len = "
            f"{subject.seq_len}: the longest has {longest} tokens"
        )
    subject.lines.append(f"examples of {key}: {shortest} to {longest} tokens ({count} sampled)")


def _tried(key: str, check: Callable[..., object], *arguments: Any) -> Iterator[BadInput]:
    try:
        check(*arguments)
    except Exception as error:
        for problem in explain(error, key).problems:
            problem.key = key  # the check knows what it looks at ("filter"), not where the user set it
            yield problem


def _refusals(subject: Subject, error: Exception, key: str, value: Any) -> Iterator[BadInput]:
    """Yield the problems of an error; data that may not be fetched now is a notice instead."""
    if isinstance(error, DataNotHere) and not subject.downloads:
        subject.notices.append(f"{key} = {value}: {error.file} is not on this machine yet: not checked")
    else:
        yield from _with_key(explain(error, key, value), key, value)


@contextmanager
def hub_offline() -> Iterator[None]:
    """Inside, the hub's libraries use their cache alone. They read the variable when they are imported."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _with_key(error: BadInput, key: str, value: Any = None) -> Iterator[BadInput]:
    """The problems of an error, each with the key where the user can change it."""
    for problem in error.problems:
        if problem.key is None:
            problem.key, problem.value = key, value if problem.value is None else problem.value
        yield problem


def explain(error: Exception, key: str, value: Any = None) -> BadInput:
    """An error of the user's own code, with the place in it; one that explains itself is left as it is."""
    if isinstance(error, BadInput):
        return error
    if isinstance(error, SyntaxError):
        return BadInput(f"SyntaxError: {error.msg}", key=key, value=value, file=error.filename, line=error.lineno)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    place = frames[-1] if frames else None
    return BadInput(
        f"{type(error).__name__}: {error}",
        key=key,
        value=value,
        file=place and place.filename,
        line=place and place.lineno,
    )


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Inside, say what is being done if it takes long."""
    timer = threading.Timer(SLOW_S, lambda: print(f"headrace: {what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
