"""Check a run before any of its processes starts: without a GPU, without torch, in about a second.

`headrace rl`, `headrace sft` and `headrace dpo` start with these checks; `--dry-run` stops after them. All problems are
reported together. A user's loss is checked by its source, since importing it would import torch.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from renderers.base import Renderer

from headrace.config.orchestrator import EnvConfig
from headrace.config.sft import ConversationsConfig, OfflineConfig, SftEvalConfig, SourceConfig
from headrace.environments.base import Environment, tasks_of
from headrace.environments.isolation import SandboxSettings, apply_settings, fallback_notice, uses_bubblewrap
from headrace.environments.registry import load_environment
from headrace.environments.tables import DataNotHere
from headrace.errors import BadInput, InvalidValue
from headrace.imports import load_function
from headrace.inference.model_shape import (
    EXPERT_KEYS,
    TESTED_FIX,
    VLLM_FIX,
    ModelShape,
    embedded_obstacle,
    read_shape,
    training_obstacle,
)
from headrace.launch.own_code import check_function_source
from headrace.launch.prompt_lengths import MAX_SAMPLED, NoModelCall, prompt_lengths, render_examples
from headrace.launch.saved_config import read_model_file
from headrace.machine import visible_gpus
from headrace.observe.monitors import wandb_mode
from headrace.observe.tracing import check_installed
from headrace.orchestrator.filters import CustomFilterConfig
from headrace.runfile.reading import filled_sources
from headrace.runfile.run import AnyRun, RunConfig
from headrace.text.hub import cached_model_directory, model_directory, read_settings
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import shared_tokenizer
from headrace.trainer.losses.custom import CustomLossConfig
from headrace.trainer.sft_data import Example, from_environment, sample_rows
from headrace.trainer.tiny import write_tiny_settings

SLOW_S = 2.0
"""Time after which a message reports what is being loaded."""


@dataclass
class Subject:
    """A run that is checked, and the results of the checks."""

    config: AnyRun
    scratch: Path
    """A temporary folder."""
    began_with: str | None = None
    """The initial model of a run that is resumed."""
    trail: tuple[Path, ...] = ()
    """The run files that depend on the model of this run."""
    renderer: Renderer | None = None
    """None if the model has not been downloaded."""
    model: Path | None = None
    shape: ModelShape | None = None
    """The sizes of the model; None if it has not been downloaded, or its config.json has unusual keys."""
    downloads: bool = True
    """Whether data may be downloaded to be checked."""
    lines: list[str] = field(default_factory=list)
    """Measured lengths, for the user."""
    notices: list[str] = field(default_factory=list)
    """Warnings about valid but probably unintended settings."""

    @property
    def seq_len(self) -> int:
        assert self.config.seq_len is not None  # validated for both kinds of run file
        return self.config.seq_len


Check = Callable[[Subject], Iterator[BadInput]]


def check_run(config: AnyRun, began_with: str | None = None, *, downloads: bool = True) -> Subject:
    """Run all checks, with the run's sandbox. Raises `BadInput` with all problems, or returns the results.

    Without `downloads`, a notice reports data that is not on this machine. With `HF_HUB_OFFLINE` it is a problem.
    """
    apply_settings(SandboxSettings(**config.environments.sandbox.model_dump()))
    downloads = downloads or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "true", "yes")
    offline = nullcontext() if downloads else hub_offline()
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as scratch, offline:
        subject = Subject(config, Path(scratch), began_with, downloads=downloads)
        problems = {(error.key, error.fact): error for check in CHECKS for error in check(subject)}
    # A key whose value is copied from another key with the same problem is not reported.
    copies = [
        (key, fact)
        for key, fact in problems
        if any((source, fact) in problems for source in filled_sources(key or "", config.FILLED_FROM))
    ]
    if problems:
        raise BadInput.combine([problem for place, problem in problems.items() if place not in copies])
    return subject


def check_output_dir(subject: Subject) -> Iterator[BadInput]:
    """Check that the directory exists or can be created."""
    path = subject.config.output_dir
    if path is None:
        yield BadInput("not set", key="output_dir", fix="Set the directory of the run.")
        return
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        fact = f"{existing} is not writable" if existing.is_dir() else f"{existing} is a file"
        yield BadInput(fact, key="output_dir", value=path, fix="Choose another directory.")


def check_monitors(subject: Subject) -> Iterator[BadInput]:
    """Check that the packages of the configured monitors are installed."""
    config = subject.config
    sections = {"tensorboard": config.tensorboard, "trackio": config.trackio}
    packages = [name for name, section in sections.items() if section is not None and section.enabled]
    try:
        if config.wandb is not None and wandb_mode(config.wandb) != "disabled":
            packages.append("wandb")
        check_installed(config.otel)
    except BadInput as error:
        yield error
    for name in packages:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # else a folder of that name, as W&B leaves behind
            fix = f"pip install 'headrace[{name}]', or remove the section."
            yield BadInput(f"the package {name} is not installed", key=f"[{name}]", fix=fix)


def check_model(subject: Subject) -> Iterator[BadInput]:
    """Check that the model has a tokenizer and a chat format that its renderers support."""
    config = subject.config
    try:
        subject.model = _local_model(subject)
        if subject.model is None:
            subject.notices.append(f"{config.model.name}: not downloaded yet; prompts are measured after the download")
            return
        tokenizer = shared_tokenizer(subject.model)
        subject.shape = read_shape(subject.model)
    except BadInput as error:
        yield from _problems_with_key(error, "model")
        return
    owners: dict[str, Any] = {"": config}
    if isinstance(config, RunConfig):
        owners = {"orchestrator.": config.orchestrator, "inference.": config.inference}
    for prefix, owner in owners.items():
        key, section = f"{prefix}renderer", owner.renderer
        try:
            renderer = make_renderer(subject.model, tokenizer, **section.model_dump(exclude={"pool_size"}))
            with suppress(TemplateError):  # the template may need another form of conversation
                renderer.render_ids([{"role": "user", "content": "Hello."}], add_generation_prompt=True)
            subject.renderer = subject.renderer or renderer
        except InvalidValue as error:
            error.key = f"{key}.{error.key}"
            yield error
        except BadInput as error:
            yield from _problems_with_key(error, "model", config.model.name)
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            fact = f"the renderer does not fit the tokenizer of {subject.model}: {error}"
            yield BadInput(fact, key=f"{key}.name", value=section.name)


def check_model_support(subject: Subject) -> Iterator[BadInput]:
    """Check that the trainer and the engine compute what the model's config.json shows."""
    config = subject.config
    if subject.model is None:
        return
    settings = read_settings(subject.model / "config.json")
    refused = partial(BadInput, key="model.name", value=config.model.name)
    if (obstacle := training_obstacle(settings)) is not None:
        yield refused(obstacle, fix=TESTED_FIX)
    samples = isinstance(config, RunConfig) or config.evaluates
    if samples and config.inference.engine == "embedded" and (obstacle := embedded_obstacle(settings)) is not None:
        yield refused(obstacle, fix=VLLM_FIX)
    has_experts = any(settings.get(key) not in (None, 0, 1) for key in EXPERT_KEYS)
    if not isinstance(config, RunConfig) or not has_experts or config.trainer.router_replay == "off":
        return
    starts_engines = config.launch.on == "local" and not config.orchestrator.client.base_url
    if config.inference.engine == "vllm" and starts_engines and not visible_gpus():
        yield BadInput(
            "vLLM on CPUs does not return which experts a token took",
            key="trainer.router_replay",
            value=config.trainer.router_replay,
            fix='Set it to "off", or inference.engine to "embedded".',
        )


def check_own_code(subject: Subject) -> Iterator[BadInput]:
    """Check that the user's algorithms, samplers, gates and filters can be imported and accept their kwargs."""
    if not isinstance(subject.config, RunConfig):
        return
    config = subject.config.orchestrator
    for number, env in enumerate(config.train.env):
        own = f"orchestrator.train.env.{number}"
        algo_key = "orchestrator.algo" if env.algo is None else f"{own}.algo"
        yield from _problems_raised_by(algo_key, config.algo_of(env).check_imports)
        curriculum = config.curriculum_of(env)
        for chosen in (curriculum.sampler, curriculum.gate):
            if chosen is not None:
                yield from _problems_raised_by(f"{own}.curriculum", chosen.check_imports)
    if isinstance(loss := subject.config.trainer.loss, CustomLossConfig):
        yield from _problems_raised_by("trainer.loss.import_path", check_function_source, loss.import_path, loss.kwargs)
    for slot in ("pre_batch_filters", "post_batch_filters"):
        for number, entry in enumerate(getattr(config, slot)):
            if isinstance(entry, CustomFilterConfig):
                key = f"orchestrator.{slot}.{number}.import_path"
                yield from _problems_raised_by(key, load_function, entry.import_path, entry.kwargs, "filter")


def check_completions(subject: Subject) -> Iterator[BadInput]:
    """Check that `max_tokens` of a completion is within `seq_len`."""
    for key, entry, defaults, seq_len in _environments(subject.config):
        own = entry.sampling.max_tokens
        most = own if own is not None else defaults.max_tokens
        if most is not None and most > seq_len:
            place = key if own is not None else key.partition(".env.")[0]
            fact = f"more than seq_len = {seq_len}, the limit of prompt and completion together"
            yield BadInput(fact, key=f"{place}.sampling.max_tokens", value=most, fix="Lower it, or raise seq_len.")


def check_sandbox(subject: Subject) -> Iterator[BadInput]:
    """Check that the sandbox works if the run file requires it."""
    if subject.config.environments.sandbox.kind == "strict":
        try:
            uses_bubblewrap()
        except BadInput as error:
            yield error


def check_environments(subject: Subject) -> Iterator[BadInput]:
    """Check that environments can be created and have tasks, and that their prompts leave room for a completion."""
    for key, entry, defaults, seq_len in _environments(subject.config):
        try:
            with message_if_slow(f"loading environment {entry.name}"):
                lengths = _measure_prompts(subject, entry, f"{key}.id")
        except Exception as error:
            yield from _problems_or_notice(subject, error, f"{key}.id", entry.id)
            continue
        if lengths:
            sampling = entry.sampling.over(defaults)
            name = f"{entry.name} (evaluation)" if "eval" in key.split(".") else entry.name
            yield from _check_prompt_lengths(subject, name, lengths, seq_len, sampling.max_tokens)
    if (notice := fallback_notice()) is not None:
        subject.notices.append(notice)


def check_data(subject: Subject) -> Iterator[BadInput]:
    """Check that examples can be read, and have tokens to train on within `seq_len`."""
    if not isinstance(subject.config, OfflineConfig):
        return
    sources = {"data": subject.config.data, "validation": subject.config.validation}
    for key, source in sources.items():
        origins = () if source is None else source.ORIGINS
        origin = next((each for each in origins if each != "fraction" and getattr(source, each)), None)
        if source is None or origin is None:
            continue
        name = f"{key}.{origin}"
        try:
            with message_if_slow(f"reading {name}"), closing(_examples(source, name, subject.config.seed)) as examples:
                yield from _check_example_lengths(subject, name, examples)
        except Exception as error:
            for problem in _problems_or_notice(subject, error, name, getattr(source, origin)):
                if problem.key and problem.key.startswith("columns."):
                    problem.key = f"{key}.{problem.key}"
                yield problem


CHECKS: tuple[Check, ...] = (
    *(check_output_dir, check_monitors, check_model, check_model_support, check_own_code, check_completions),
    *(check_sandbox, check_environments, check_data),
)


def _local_model(subject: Subject) -> Path | None:
    """Return a directory with the model's settings, tokenizer and chat template; None if not downloaded yet."""
    if subject.began_with is not None:
        return model_directory(subject.began_with)
    model = subject.config.model
    if model.sft is not None:
        return _base_of_sft_model(subject, model.sft)
    if model.init is not None:
        write_tiny_settings(subject.scratch / model.init)
        return subject.scratch / model.init
    if model.name is None:
        raise BadInput("not set", key="model", fix="Set model.name, model.init or model.sft.")
    return cached_model_directory(model.name, "model.name", fetch_later=not subject.downloads)


def _base_of_sft_model(subject: Subject, file: Path) -> Path | None:
    """Check an SFT run file that trains the initial model, and return its base model."""
    config, _ = read_model_file(file, subject.trail)
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


def _environments(config: AnyRun) -> list[tuple[str, EnvConfig, Any, int]]:
    """Return every environment with its key, the sampling defaults, and the maximum length of a conversation."""
    slots: dict[str, Any]
    if isinstance(config, RunConfig):
        slots = {"orchestrator.train": config.orchestrator.train, "orchestrator.eval": config.orchestrator.eval}
        seq_len = config.seq_len
    else:
        slots, seq_len = {"eval": config.eval}, config.inference.max_model_len or config.seq_len
    assert seq_len is not None
    return [
        (f"{key}.env.{number}", env, slot.sampling, seq_len)
        for key, slot in slots.items()
        for number, env in enumerate(slot.env)
    ]


def _measure_prompts(subject: Subject, entry: EnvConfig, key: str) -> list[int]:
    """Create an environment and return the lengths of its prompts, if they can be measured."""
    args = dict(entry.args)
    if entry.id == "hackable" and subject.model is not None:
        args.setdefault("tokenizer_name", str(subject.model))
    environment = load_environment(entry.id, args, key)
    tasks = tasks_of(environment, entry.name, key)
    if subject.renderer is None:
        return []
    if type(environment).start is not Environment.start:
        subject.notices.append(f"prompts of {entry.name} are not measured: its episodes may need start()")
        return []
    try:
        return prompt_lengths(environment, tasks, subject.renderer)
    except NoModelCall as error:
        subject.notices.append(f"prompts of {entry.name} are not measured: {error}")
        return []


def _check_prompt_lengths(
    subject: Subject, name: str, lengths: Sequence[int], seq_len: int, max_tokens: int | None
) -> Iterator[BadInput]:
    shortest, longest, count = min(lengths), max(lengths), len(lengths)
    if shortest >= seq_len:
        fact = f"the shortest of {count} prompts of {name} has {shortest} tokens, the longest {longest}"
        fix = f"Raise seq_len to at least {longest + (max_tokens or 1)}."
        yield BadInput(fact, key="seq_len", value=seq_len, fix=fix)
        return
    if longest >= seq_len:
        too_long = sum(length >= seq_len for length in lengths)
        subject.notices.append(
            f"seq_len = {seq_len}: {too_long} of {count} sampled prompts of {name} are longer, up to {longest} tokens; "
            "their episodes will fail"
        )
    room = seq_len - min(longest, seq_len - 1)
    most = room if max_tokens is None else min(room, max_tokens)
    subject.lines.append(
        f"prompts of {name}: {shortest} to {longest} tokens ({count} sampled), completions up to {most}"
    )


def _examples(source: SourceConfig, key: str, seed: int) -> Generator[Example, None, None]:
    """Yield some of a source's examples; none of a dataset that would have to be downloaded."""
    if isinstance(source, ConversationsConfig) and source.env is not None:
        environment = load_environment(source.env, source.args, key)
        yield from islice(from_environment(environment, seed, 0), MAX_SAMPLED)
    elif source.path is not None:
        yield from sample_rows(source.path, source, MAX_SAMPLED)


def _check_example_lengths(subject: Subject, key: str, examples: Iterator[Example]) -> Iterator[BadInput]:
    if subject.renderer is None:
        next(examples, None)  # the first is still read and checked
        return
    samples = render_examples(examples, subject.renderer, subject.seq_len)
    if not samples:
        return
    lengths = [len(sample) for sample in samples]
    shortest, longest, count = min(lengths), max(lengths), len(lengths)
    empty = sum(not sample.mask[1 : subject.seq_len].any() for sample in samples)
    if empty == count:
        fact = f"no token to train on within it in {count} sampled examples of {key} ({shortest} to {longest} tokens)"
        yield BadInput(fact, key="seq_len", value=subject.seq_len, fix=f"Raise seq_len to at least {longest}.")
        return
    if empty:
        subject.notices.append(
            f"seq_len = {subject.seq_len}: {empty} of {count} sampled examples of {key} have no token to train on "
            f"within it; the longest has {longest} tokens"
        )
    subject.lines.append(f"examples of {key}: {shortest} to {longest} tokens ({count} sampled)")


def _problems_raised_by(key: str, check: Callable[..., object], *arguments: Any) -> Iterator[BadInput]:
    """Call a check, and yield the problems that it raises, under the key where the user set its subject."""
    try:
        check(*arguments)
    except Exception as error:
        for problem in explain(error, key).problems:
            problem.key = key  # the check names only its kind ("filter")
            yield problem


def _problems_or_notice(subject: Subject, error: Exception, key: str, value: Any) -> Iterator[BadInput]:
    """Yield the problems of an error; data that must not be downloaded now becomes a notice."""
    if isinstance(error, DataNotHere) and not subject.downloads:
        subject.notices.append(f"{key} = {value}: {error.file} is not downloaded yet and was not checked")
    else:
        yield from _problems_with_key(explain(error, key, value), key, value)


@contextmanager
def hub_offline() -> Iterator[None]:
    """Make the hub's libraries use only their cache. They read the variable when they are imported."""
    before = os.environ.pop("HF_HUB_OFFLINE", None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        del os.environ["HF_HUB_OFFLINE"]
        if before is not None:
            os.environ["HF_HUB_OFFLINE"] = before


def _problems_with_key(error: BadInput, key: str, value: Any = None) -> Iterator[BadInput]:
    """Yield the problems of an error, each with a key."""
    for problem in error.problems:
        if problem.key is None:
            problem.key, problem.value = key, value if problem.value is None else problem.value
        yield problem


def explain(error: Exception, key: str, value: Any = None) -> BadInput:
    """Return an error of the user's code as `BadInput` with its file and line; `BadInput` is returned as it is."""
    if isinstance(error, BadInput):
        return error
    if isinstance(error, SyntaxError):
        return BadInput(f"SyntaxError: {error.msg}", key=key, value=value, file=error.filename, line=error.lineno)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    file, line = (frames[-1].filename, frames[-1].lineno) if frames else (None, None)
    return BadInput(f"{type(error).__name__}: {error}", key=key, value=value, file=file, line=line)


@contextmanager
def message_if_slow(message: str) -> Iterator[None]:
    """Print a message if the block takes longer than `SLOW_S`."""
    timer = threading.Timer(SLOW_S, lambda: print(f"headrace: {message} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
