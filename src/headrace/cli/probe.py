"""`headrace probe`: try an environment before training on it: hostile answers, prompts, rewards, what to fix."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from headrace.cli.common import importable

if TYPE_CHECKING:
    from headrace.tools.probe.report import ProbeReport
    from headrace.tools.probe.runner import ProbeConfig, Progress
    from headrace.tools.probe.sampling import SamplingEndpoint


def configure_probe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "environment", metavar="ENV", help="an id as in a run file, package.module:Class, or my_env.py:Class"
    )
    parser.add_argument(
        "--args", metavar="JSON", default="{}", help="the environment's args; or one by one, --args.key"
    )
    parser.add_argument("--examples", metavar="N", type=_positive, default=3, help="prompts shown, tasks attacked [3]")
    parser.add_argument("--tasks", metavar="N", type=_positive, default=16, help="tasks that gold is played on [16]")
    parser.add_argument(
        "--timeout", metavar="S", type=_seconds, default=10.0, help="seconds of one scripted episode [10]"
    )
    parser.add_argument("--load-timeout", metavar="S", type=_seconds, default=600.0, help="seconds to load it [600]")
    parser.add_argument("--model", metavar="DIR|NAME", help="render and count prompts with its tokenizer [tiny]")
    parser.add_argument("--seq-len", metavar="N", type=_positive, help="the run's seq_len: do prompts fit?")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    sampling = parser.add_argument_group("to have a model play and see which groups would teach anything")
    sampling.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server, http://host:port/v1")
    sampling.add_argument("--endpoint-model", metavar="NAME", help="which of its models [its first]")
    sampling.add_argument("--api-key-var", metavar="VAR", help="the environment variable with its key")
    sampling.add_argument("--sample", metavar="TASKSxN", type=_product, default=(16, 8), help="episodes [16x8]")
    sampling.add_argument("--group-size", metavar="G", type=_positive, default=8, help="the run's group_size [8]")
    sampling.add_argument("--temperature", metavar="T", type=float, default=1.0, help="[1]")
    sampling.add_argument("--max-tokens", metavar="N", type=_positive, help="of one reply")
    sampling.add_argument("--concurrency", metavar="N", type=_positive, default=16, help="episodes at once [16]")
    parser.epilog = "Keys of the environment and the renderer: --args.split eval --renderer.name qwen3"


def run_probe(arguments: argparse.Namespace) -> int:
    import asyncio
    import json

    import msgspec
    from rich.console import Console

    from headrace.tools.probe.findings import list_findings
    from headrace.tools.probe.view import render_report

    config = read_options(arguments.args, arguments.overrides)
    identifier = importable(arguments.environment, "environment")
    with _progress() as progress:
        report = asyncio.run(_probe(identifier, config, arguments, progress))
    findings = list_findings(report)
    failed = any(finding.severity == "error" for finding in findings)
    if arguments.json:
        print(json.dumps({**msgspec.to_builtins(report), "findings": msgspec.to_builtins(findings)}))
    else:
        Console(highlight=False).print(render_report(report, findings))
    return 1 if failed else 0


async def _probe(
    identifier: str, config: ProbeConfig, arguments: argparse.Namespace, progress: Progress
) -> ProbeReport:
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from headrace.text.hub import model_directory
    from headrace.tools.probe.prompts import TINY, exchange_renderer, summarize_prompts
    from headrace.tools.probe.runner import probe
    from headrace.tools.probe.sampling import sample
    from headrace.trainer.tiny import write_tiny_settings

    with TemporaryDirectory() as scratch:  # before all else: the model may be misspelt
        if arguments.model is None:
            write_tiny_settings(Path(scratch))
        directory = Path(scratch) if arguments.model is None else model_directory(arguments.model)
        render = exchange_renderer(directory, config.renderer.model_dump())
    endpoint = await _endpoint(arguments)
    tasks, episodes = arguments.sample
    report, to_sample = await probe(
        identifier,
        config.args,
        tasks=arguments.tasks,
        examples=arguments.examples,
        timeout=arguments.timeout,
        load_timeout=arguments.load_timeout,
        sampled=tasks if endpoint is not None else 0,
        progress=progress,
    )
    report.seq_len = arguments.seq_len
    report.prompts = summarize_prompts(report, arguments.examples, render, arguments.model or TINY)
    for episode in report.episodes:
        episode.exchange = None  # it has been read
    if endpoint is not None:
        report.sampled = await sample(report, to_sample, endpoint, episodes, arguments.group_size, progress)
    return report


async def _endpoint(arguments: argparse.Namespace) -> SamplingEndpoint | None:
    from headrace.tools.probe.sampling import SamplingEndpoint

    if arguments.endpoint is None:
        return None
    server = arguments.endpoint, arguments.endpoint_model, arguments.api_key_var
    return await SamplingEndpoint(
        *server, arguments.temperature, arguments.max_tokens, arguments.concurrency
    ).with_model()


def read_options(args: str, overrides: list[str]) -> ProbeConfig:
    """The environment's args and the renderer's options, from JSON and from `--section.key value`."""
    import json

    from headrace.config.base import ConfigError, Tree
    from headrace.runfile.reading import parse_overrides, put, validate
    from headrace.tools.probe.runner import ProbeConfig

    try:
        tree: Tree = {"args": json.loads(args)}
    except ValueError as error:
        raise ConfigError(f"--args is not JSON: {error}; or give them one by one, --args.key value") from error
    for key, value in parse_overrides(overrides):
        put(tree, key, value)
    return validate(ProbeConfig, tree, "command line")[0]


@contextmanager
def _progress() -> Iterator[Progress]:
    """A line on a terminal that says what is being done."""
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:

        def tell(what: str, done: int, total: int) -> None:
            status.update(Text(f"{what} ({done}/{total})" if total else what))

        yield tell


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def _product(text: str) -> tuple[int, int]:
    tasks, times, episodes = text.partition("x")
    if not times:
        raise argparse.ArgumentTypeError(f"{text!r} is not TASKSxEPISODES, as 16x8 is")
    return _positive(tasks), _positive(episodes)
