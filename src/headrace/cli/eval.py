"""`headrace eval`: evaluate finished models on an environment: accuracy, pass@k, format, lengths."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.api.model import complete_evaluation
from headrace.cli.common import add_format, importable, output_console, positive
from headrace.config.model import RendererConfig, SamplingConfig
from headrace.errors import BadInput
from headrace.launch.errors import notify
from headrace.observe.chart_export import check_format, convert_plots
from headrace.observe.console import SafeConsole
from headrace.observe.status import setup_logging
from headrace.orchestrator.shutdown import run_loop
from headrace.runfile.reading import parse_value, validate
from headrace.tools.evaluate.candidates import Candidate
from headrace.tools.evaluate.completions import Correctness
from headrace.tools.evaluate.episodes import Evaluation
from headrace.tools.evaluate.evaluation import EvaluationOutcome, evaluate
from headrace.tools.evaluate.report import length_table, sampling_line, score_table, show_progress, write_report
from headrace.tools.evaluate.results import zero_shot_record
from headrace.transport.files import write_atomically

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
PIPE_WIDTH = 160


def configure_eval(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "models",
        metavar="CHECKPOINT",
        nargs="+",
        help="a model directory; a run, or a folder of runs; a checkpoint; a server, http://HOST:PORT[,http://...]",
    )
    add("--env", metavar="ID", help="an environment's id, as in a run file [the run's own]")
    pairs = {"metavar": "KEY=VALUE", "nargs": "+", "default": [], "type": _pair}
    add("--env-args", **pairs, help="its args: split=test limit=100")  # type: ignore[arg-type]
    add("--level", metavar="N", nargs="+", type=positive, help="of math: only problems of this level")
    add("--checkpoints", choices=("final", "permanent"), default="final", help="which models of a run [final]")
    add(
        "--output",
        metavar="DIR",
        type=Path,
        help="where to write [outputs/eval/ENV, or artifacts/eval/ENV of the run's storage root]",
    )
    add_format(parser)
    add("--num-examples", metavar="N", type=positive, help="only the first N examples [all]")
    add("--samples", metavar="K", type=positive, default=1, help="episodes per example [1]")
    add("--concurrency", metavar="N", type=positive, default=256, help="episodes at once on an engine [256]")
    add("--zero-shot", metavar="FILE", type=Path, help="also write the record of one model's examples")
    sampling = parser.add_argument_group("how replies are sampled")
    sampling.add_argument("--temperature", metavar="T", type=float, default=0.0, help="[0: the likeliest token]")
    sampling.add_argument("--top-p", metavar="P", type=float, help="among the likeliest tokens of this total [1]")
    sampling.add_argument("--top-k", metavar="N", type=int, help="among this number of likeliest tokens [all]")
    sampling.add_argument("--min-p", metavar="P", type=float, help="at least this share of the likeliest one [0]")
    sampling.add_argument("--max-tokens", metavar="N", type=positive, help="of one reply [the rest of the context]")
    sampling.add_argument("--seq-len", metavar="N", type=positive, help="of a conversation [the server's maximum]")
    sampling.add_argument("--seed", metavar="N", type=int, help="for reproducible replies [none]")
    sampling.add_argument(
        "--latents", choices=("on", "off"), help="whether thoughts are in latent space [as the model was trained]"
    )
    sampling.add_argument("--renderer", **pairs, help="as in a run file [the run's own]")  # type: ignore[arg-type]
    reading = parser.add_argument_group("how replies are scored")
    reading.add_argument("--correct", metavar="NAME", help="the reward or metric that is 1 if an answer is correct")
    reading.add_argument("--solved", metavar="R", type=float, help="the lowest reward of a correct answer [1]")
    reading.add_argument(
        "--think-tags", metavar=("OPENING", "CLOSING"), nargs=2, help="tags around reasoning [the environment's]"
    )
    running = parser.add_argument_group("processes and servers")
    running.add_argument("--timeout", metavar="S", type=float, help="seconds of one episode [no limit]")
    running.add_argument("--workers", metavar="N", type=int, default=0, help="processes for the environment [0]")
    running.add_argument(
        "--engines", metavar="N", type=positive, help="on this machine at once [one on each GPU; else by cores]"
    )
    running.add_argument(
        "--serve-args", metavar="KEY=VALUE", nargs="+", default=[], type=_option, help="of [inference]: engine=vllm"
    )
    running.add_argument("--tokenizer", metavar="DIR", help="a model directory, for a server that names none")
    running.add_argument("--endpoint-model", metavar="NAME", help="the model of a server that has several")
    running.add_argument(
        "--api-key-var", metavar="VAR", default="HEADRACE_API_KEY", help="the variable with its key [HEADRACE_API_KEY]"
    )
    parser.epilog = "The same command continues an evaluation that was stopped. See docs/how-to/evaluation.md."


def run_eval(arguments: argparse.Namespace) -> int:
    setup_logging()
    evaluation, candidates, subject = prepare(arguments)
    with show_progress(SafeConsole(stderr=True)) as progress:
        outcomes = run_loop(_until_signal(evaluate(evaluation, candidates, progress)))
    if isinstance(outcomes, int):
        notify("stopped; the same command goes on from here")
        return 128 + outcomes
    return _report(arguments, evaluation, subject, outcomes)


async def _until_signal(work: Coroutine[Any, Any, list[EvaluationOutcome]]) -> list[EvaluationOutcome] | int:
    """Return the outcomes, or the number of the signal that cancelled the evaluation; servers are stopped in order."""
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
    """Return the evaluation, the models, and the environment's name; nothing is started or written."""
    check_format(arguments.format)
    evaluation = read_evaluation(arguments)
    evaluation, candidates, subject = complete_evaluation(
        evaluation, arguments.models, permanent=arguments.checkpoints == "permanent"
    )
    if arguments.zero_shot is not None and len(candidates) != 1:
        fact = f"the record is of one model, and these are {len(candidates)}"
        raise BadInput(fact, key="--zero-shot", fix="Give one CHECKPOINT.")
    return evaluation, candidates, subject


def _report(
    arguments: argparse.Namespace, evaluation: Evaluation, subject: str, outcomes: Sequence[EvaluationOutcome]
) -> int:
    """Write the files and print the tables; returns the exit code."""
    results = [outcome.result for outcome in outcomes]
    title = f"{subject}, {arguments.samples} sample{'s' * (arguments.samples > 1)} each"
    about = {
        "environment": evaluation.env,
        "args": evaluation.args,
        "sampling": {key: evaluation.sampling.get(key) for key in SAMPLING},
        "samples": evaluation.samples,
        "seed": evaluation.seed,
        "seq_len": evaluation.seq_len,
        "renderer": evaluation.renderer,
    }
    files = write_report(evaluation.output, title, about, results)
    files += convert_plots(files, arguments.format)
    if arguments.zero_shot is not None and outcomes[0].scored:
        lines = b"".join(msgspec.json.encode(line) + b"\n" for line in zero_shot_record(outcomes[0].scored))
        write_atomically(arguments.zero_shot, lines)
        files.append(arguments.zero_shot)
    console = output_console(PIPE_WIDTH)
    if any(not result.failure for result in results):
        console.print(score_table(title, results))
        if any(result.lengths for result in results):
            console.print(length_table(results))
        console.print(sampling_line(about), soft_wrap=True)
    print(f"wrote {', '.join(map(str, files))}")
    for notice in dict.fromkeys(notice for result in results for notice in result.notices):
        names = ", ".join(result.name for result in results if notice in result.notices)
        notify(f"{names}: {notice}")
    failed = [result for result in results if result.failure]
    notify(*(f"{result.name} was not evaluated: {result.failure}" for result in failed))
    return 1 if failed else 0


def read_evaluation(arguments: argparse.Namespace) -> Evaluation:
    """Return the evaluation of the arguments; `output` and an environment that is not set are filled in later."""
    if arguments.samples > 1 and arguments.temperature == 0:
        fact = "samples of temperature 0 are all alike"
        raise BadInput(fact, key="--samples", value=arguments.samples, fix="Set --temperature, or leave --samples out.")
    set_keys = {key: value for key in SAMPLING if (value := getattr(arguments, key)) is not None}
    sampling, _ = validate(SamplingConfig, set_keys, "command line")
    renderer, env_args = dict(arguments.renderer), dict(arguments.env_args)
    validate(RendererConfig, renderer, "--renderer")
    if arguments.level is not None:
        if "levels" in env_args:
            raise BadInput("--env-args has levels, too", key="--level", value=arguments.level, fix="Give one of them.")
        env_args["levels"] = arguments.level
    return Evaluation(
        output=arguments.output or Path(),
        env=importable(arguments.env, "environment") if arguments.env else "",
        args=env_args,
        sampling=sampling.model_dump(exclude_none=True),
        samples=arguments.samples,
        num_examples=arguments.num_examples,
        seq_len=arguments.seq_len,
        seed=arguments.seed,
        tags=arguments.think_tags and tuple(arguments.think_tags),
        correct=Correctness(arguments.correct, arguments.solved),
        concurrency=arguments.concurrency,
        timeout=arguments.timeout,
        workers=arguments.workers,
        renderer=renderer,
        serve_options=arguments.serve_args,
        engines=arguments.engines,
        key_var=arguments.api_key_var,
        tokenizer=arguments.tokenizer,
        endpoint_model=arguments.endpoint_model,
        latents=None if arguments.latents is None else arguments.latents == "on",
    )


def _pair(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not (separator and key):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE (and CHECKPOINT comes before all options)")
    return key, parse_value(value)


def _option(text: str) -> str:
    """Return KEY=VALUE as an option of `headrace serve`."""
    _pair(text)
    return f"--{text}"
