"""`headrace eval`: how good finished models are on an environment: accuracy, pass@k, format, lengths."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.common import add_format, importable

if TYPE_CHECKING:
    from headrace.tools.evaluate.candidates import Candidate
    from headrace.tools.evaluate.evaluation import Evaluation, EvaluationOutcome
    from headrace.tools.evaluate.results import ModelResult

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
PIPE_WIDTH = 160
"""Columns where there is no terminal to fit into."""


def configure_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        metavar="CHECKPOINT",
        nargs="+",
        help="a model directory; a run, or a folder of runs; a checkpoint; a server, http://HOST:PORT[,http://...]",
    )
    parser.add_argument("--env", metavar="ID", help="an environment's id, as in a run file [the run's own]")
    pairs = {"metavar": "KEY=VALUE", "nargs": "+", "default": [], "type": _pair}
    parser.add_argument("--env-args", **pairs, help="its args: split=test limit=100")  # type: ignore[arg-type]
    parser.add_argument("--level", metavar="N", nargs="+", type=_positive, help="of math: only problems of this level")
    parser.add_argument(
        "--checkpoints", choices=("final", "permanent"), default="final", help="which models of a run [final]"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="where to write [outputs/eval/ENV, or artifacts/eval/ENV of the run's storage root]",
    )
    add_format(parser)
    parser.add_argument("--num-examples", metavar="N", type=_positive, help="only the first N examples [all]")
    parser.add_argument("--samples", metavar="K", type=_positive, default=1, help="episodes per example [1]")
    parser.add_argument(
        "--concurrency", metavar="N", type=_positive, default=256, help="episodes at once on an engine [256]"
    )
    parser.add_argument("--zero-shot", metavar="FILE", type=Path, help="write the record of one model's examples, too")
    sampling = parser.add_argument_group("how replies are sampled")
    sampling.add_argument("--temperature", metavar="T", type=float, default=0.0, help="[0: the likeliest token]")
    sampling.add_argument("--top-p", metavar="P", type=float, help="among the likeliest tokens of this total [1]")
    sampling.add_argument("--top-k", metavar="N", type=int, help="among so many of the likeliest tokens [all]")
    sampling.add_argument("--min-p", metavar="P", type=float, help="among those so probable beside the likeliest [0]")
    sampling.add_argument("--max-tokens", metavar="N", type=_positive, help="of one reply [what there is room for]")
    sampling.add_argument("--seq-len", metavar="N", type=_positive, help="of a conversation [what the server takes]")
    sampling.add_argument("--seed", metavar="N", type=int, help="for replies that can be had again [none]")
    sampling.add_argument("--renderer", **pairs, help="as in a run file [the run's own]")  # type: ignore[arg-type]
    reading = parser.add_argument_group("how they are read")
    reading.add_argument("--correct", metavar="NAME", help="the reward or metric that is 1 where an answer is right")
    reading.add_argument("--solved", metavar="R", type=float, help="count an answer as right from this reward on [1]")
    reading.add_argument(
        "--think-tags", metavar=("OPENING", "CLOSING"), nargs=2, help="around thoughts [the environment's]"
    )
    running = parser.add_argument_group("what runs")
    running.add_argument("--timeout", metavar="S", type=float, help="seconds of one episode [any]")
    running.add_argument("--workers", metavar="N", type=int, default=0, help="processes for the environment [0]")
    running.add_argument(
        "--engines", metavar="N", type=_positive, help="on this machine at once [one on each GPU; else by cores]"
    )
    running.add_argument(
        "--serve-args", metavar="KEY=VALUE", nargs="+", default=[], type=_option, help="of [inference]: engine=vllm"
    )
    running.add_argument("--tokenizer", metavar="DIR", help="a model directory, for a server that names none")
    running.add_argument("--endpoint-model", metavar="NAME", help="what a server with several models calls it")
    running.add_argument(
        "--api-key-var", metavar="VAR", default="HEADRACE_API_KEY", help="the variable with its key [HEADRACE_API_KEY]"
    )
    parser.epilog = (
        "What was done is kept: the same command goes on where it was stopped. See docs/how-to/evaluation.md."
    )


def run_eval(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from headrace.observe.logs import setup_logging
    from headrace.orchestrator.shutdown import run_loop
    from headrace.tools.evaluate.evaluation import evaluate
    from headrace.tools.evaluate.report import show_progress

    setup_logging()
    evaluation, candidates, subject = prepare(arguments)
    with show_progress(Console(stderr=True, highlight=False)) as progress:
        outcomes = run_loop(_until_signal(evaluate(evaluation, candidates, progress)))
    if isinstance(outcomes, int):
        print("headrace: stopped; the same command goes on from here", file=sys.stderr)
        return 128 + outcomes
    return report(arguments, evaluation, subject, outcomes)


async def _until_signal(work: Coroutine[Any, Any, list[EvaluationOutcome]]) -> list[EvaluationOutcome] | int:
    """Return what the evaluation came to, or the number of the signal that ended it: servers end with it, in order."""
    import asyncio
    import signal

    task = asyncio.ensure_future(work)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return received[0]


def prepare(arguments: argparse.Namespace) -> tuple[Evaluation, list[Candidate], str]:
    """Return what is evaluated, on which models, and the environment's name; nothing has been started or written."""
    from headrace.errors import BadInput
    from headrace.launch.own_code import add_code_folders_of
    from headrace.launch.process import set_variables
    from headrace.launch.saved_config import evaluation_directory, read_run
    from headrace.observe.chart_export import check_format
    from headrace.tools.evaluate.candidates import find_models, run_environment
    from headrace.transport.run_dir import RunDir

    check_format(arguments.format)
    evaluation = read_evaluation(arguments)
    candidates = find_models(arguments.models, permanent=arguments.checkpoints == "permanent")
    if arguments.zero_shot is not None and len(candidates) != 1:
        raise BadInput(
            f"the record is of one model, and these are {len(candidates)}",
            key="--zero-shot",
            fix="Give one CHECKPOINT.",
        )
    subject = evaluation.env
    if not evaluation.env:
        own = run_environment(candidates)
        evaluation = evaluation._replace(env=own.id, args=own.args | evaluation.args)
        subject = own.name
        print(f"on {own.name}, as {own.run} has it", file=sys.stderr)
    runs = list(dict.fromkeys(candidate.run for candidate in candidates if candidate.run is not None))
    for run in runs:
        add_code_folders_of(RunDir(run))  # the environment may be one of the run's own
    if runs:
        set_variables(read_run(runs[0]).launch)  # where its data is, HF_HOME above all
    output = arguments.output or evaluation_directory(runs[0] if runs else None, subject)
    return evaluation._replace(output=output), candidates, subject


def report(
    arguments: argparse.Namespace, evaluation: Evaluation, subject: str, outcomes: Sequence[EvaluationOutcome]
) -> int:
    """Write the files, print the tables; returns the exit code."""
    import msgspec
    from rich.console import Console

    from headrace.observe.chart_export import convert_plots
    from headrace.tools.evaluate.report import length_table, sampling_line, score_table, write_report
    from headrace.tools.evaluate.results import zero_shot_record
    from headrace.transport.files import write_atomically

    results = [outcome.result for outcome in outcomes]
    title = f"{subject}, {arguments.samples} sample{'s' * (arguments.samples > 1)} each"
    about = {"environment": evaluation.env, "args": evaluation.args, **settings_of(evaluation)}
    files = write_report(evaluation.output, title, about, results)
    files += convert_plots(files, arguments.format)
    if arguments.zero_shot is not None and outcomes[0].scored:
        lines = b"".join(msgspec.json.encode(line) + b"\n" for line in zero_shot_record(outcomes[0].scored))
        write_atomically(arguments.zero_shot, lines)
        files.append(arguments.zero_shot)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if any(not result.failure for result in results):
        console.print(score_table(title, results))
        if any(result.lengths for result in results):
            console.print(length_table(results))
        console.print(sampling_line(about), soft_wrap=True)
    print(f"wrote {', '.join(map(str, files))}")
    for notice, names in notices_of(results).items():
        print(f"headrace: {', '.join(names)}: {notice}", file=sys.stderr)
    failed = [result for result in results if result.failure]
    for result in failed:
        print(f"headrace: {result.name} was not evaluated: {result.failure}", file=sys.stderr)
    return 1 if failed else 0


def read_evaluation(arguments: argparse.Namespace) -> Evaluation:
    from headrace.config.model import RendererConfig, SamplingConfig
    from headrace.errors import BadInput
    from headrace.runfile.reading import validate
    from headrace.tools.evaluate.completions import Correctness
    from headrace.tools.evaluate.episodes import Conditions
    from headrace.tools.evaluate.evaluation import Evaluation

    if arguments.samples > 1 and arguments.temperature == 0:
        raise BadInput(
            "samples of temperature 0 are all alike",
            key="--samples",
            value=arguments.samples,
            fix="Set --temperature, or leave --samples out.",
        )
    named = {key: getattr(arguments, key) for key in SAMPLING}
    given = {key: value for key, value in named.items() if value is not None}
    sampling, _ = validate(SamplingConfig, given, "command line")
    renderer = dict(arguments.renderer)
    validate(RendererConfig, renderer, "--renderer")
    env_args = dict(arguments.env_args)
    if arguments.level is not None:
        if "levels" in env_args:
            raise BadInput("--env-args has levels, too", key="--level", value=arguments.level, fix="Give one of them.")
        env_args["levels"] = arguments.level
    conditions = Conditions(
        arguments.samples,
        sampling.model_dump(exclude_none=True),
        arguments.seq_len,
        arguments.seed,
        arguments.think_tags and tuple(arguments.think_tags),
        Correctness(arguments.correct, arguments.solved),
        arguments.concurrency,
        arguments.timeout,
        arguments.tokenizer,
        arguments.endpoint_model,
    )
    return Evaluation(
        arguments.output or Path(),
        importable(arguments.env, "environment") if arguments.env else "",
        env_args,
        arguments.workers,
        arguments.num_examples,
        conditions,
        renderer,
        arguments.serve_args,
        arguments.api_key_var,
        arguments.engines,
    )


def notices_of(results: Sequence[ModelResult]) -> dict[str, list[str]]:
    """Each notice once, with the models that it is about."""
    found: dict[str, list[str]] = {}
    for result in results:
        for notice in result.notices:
            found.setdefault(notice, []).append(result.name)
    return found


def settings_of(evaluation: Evaluation) -> dict[str, Any]:
    """How replies were sampled, as `results.json` has it; null where an option was not set."""
    given = evaluation.conditions
    return {
        "sampling": {key: given.sampling.get(key) for key in SAMPLING},
        "samples": given.samples,
        "seed": given.seed,
        "seq_len": given.seq_len,
        "renderer": evaluation.renderer,
    }


def _pair(text: str) -> tuple[str, Any]:
    from headrace.runfile.reading import parse_value

    key, separator, value = text.partition("=")
    if not (separator and key):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE (and CHECKPOINT comes before all options)")
    return key, parse_value(value)


def _option(text: str) -> str:
    """As `headrace serve` takes it."""
    _pair(text)
    return f"--{text}"


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)
