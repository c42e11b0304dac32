"""`headrace probe`: test an environment before training: hostile answers, prompts, rewards."""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from headrace.cli.common import importable, positive, progress_line
from headrace.config.base import ConfigError, Tree
from headrace.observe.console import SafeConsole
from headrace.runfile.reading import parse_overrides, put, validate
from headrace.text import import_renderers
from headrace.text.hub import model_directory
from headrace.tools.common import ReportProgress
from headrace.tools.probe.findings import list_findings
from headrace.tools.probe.report import TINY, ProbeReport, exchange_renderer, summarize_prompts
from headrace.tools.probe.runner import ProbeConfig, probe
from headrace.tools.probe.sampling import SamplingEndpoint, sample
from headrace.tools.probe.view import render_report


def configure_probe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("environment", metavar="ENV", help="an id as in a run file, package.module:Class, or my_env.py:Class")
    add("--args", metavar="JSON", default="{}", help="the environment's args; or one by one, --args.key")
    add("--examples", metavar="N", type=positive, default=3, help="prompts shown, tasks attacked [3]")
    add("--tasks", metavar="N", type=positive, default=16, help="tasks on which gold runs [16]")
    add("--timeout", metavar="S", type=_seconds, default=10.0, help="seconds of one scripted episode [10]")
    add("--load-timeout", metavar="S", type=_seconds, default=600.0, help="seconds to load it [600]")
    add("--model", metavar="DIR|NAME", help="render and count prompts with its tokenizer [tiny]")
    add("--seq-len", metavar="N", type=positive, help="the run's seq_len: do prompts fit?")
    add("--json", action="store_true", help="print one JSON object")
    sampling = parser.add_argument_group("to sample episodes with a model and predict how many groups have a signal")
    sampling.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server, http://host:port/v1")
    sampling.add_argument("--endpoint-model", metavar="NAME", help="which of its models [its first]")
    sampling.add_argument("--api-key-var", metavar="VAR", help="the environment variable with its key")
    sampling.add_argument("--sample", metavar="TASKSxN", type=_product, default=(16, 8), help="episodes [16x8]")
    sampling.add_argument("--group-size", metavar="G", type=positive, default=8, help="the run's group_size [8]")
    sampling.add_argument("--temperature", metavar="T", type=float, default=1.0, help="[1]")
    sampling.add_argument("--max-tokens", metavar="N", type=positive, help="of one reply")
    sampling.add_argument("--concurrency", metavar="N", type=positive, default=16, help="episodes at once [16]")
    parser.epilog = "Keys of the environment and the renderer: --args.split eval --renderer.name qwen3"


def run_probe(arguments: argparse.Namespace) -> int:
    config = read_options(arguments.args, arguments.overrides)
    import_renderers()
    identifier = importable(arguments.environment, "environment")
    with progress_line() as progress:
        report = asyncio.run(_probe(identifier, config, arguments, progress))
    findings = list_findings(report)
    if arguments.json:
        print(json.dumps({**msgspec.to_builtins(report), "findings": msgspec.to_builtins(findings)}))
    else:
        SafeConsole().print(render_report(report, findings))
    return 1 if any(finding.severity == "error" for finding in findings) else 0


async def _probe(
    identifier: str, config: ProbeConfig, arguments: argparse.Namespace, progress: ReportProgress
) -> ProbeReport:
    from headrace.trainer.tiny import write_tiny_settings

    with TemporaryDirectory() as scratch:  # before the probe, because the model may be misspelt
        if arguments.model is None:
            write_tiny_settings(Path(scratch))
        directory = Path(scratch) if arguments.model is None else model_directory(arguments.model)
        render = exchange_renderer(directory, config.renderer.model_dump())
    endpoint = None
    if arguments.endpoint is not None:
        server = arguments.endpoint, arguments.endpoint_model, arguments.api_key_var
        sampling = arguments.temperature, arguments.max_tokens, arguments.concurrency
        endpoint = await SamplingEndpoint(*server, *sampling).with_model()
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
        episode.exchange = None  # not part of the output
    if endpoint is not None:
        report.sampled = await sample(report, to_sample, endpoint, episodes, arguments.group_size, progress)
    return report


def read_options(args: str, overrides: list[str]) -> ProbeConfig:
    """Return the args of the environment and the renderer's options, from JSON and `--section.key value`."""
    try:
        tree: Tree = {"args": json.loads(args)}
    except ValueError as error:
        fact = f"not JSON: {error}"
        raise ConfigError(fact, key="--args", value=args, fix="Or give them one by one: --args.KEY VALUE.") from error
    for key, value in parse_overrides(overrides):
        put(tree, key, value)
    return validate(ProbeConfig, tree, "command line")[0]


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def _product(text: str) -> tuple[int, int]:
    tasks, times, episodes = text.partition("x")
    if not times:
        raise argparse.ArgumentTypeError(f"{text!r} is not TASKSxEPISODES, as 16x8 is")
    return positive(tasks), positive(episodes)
