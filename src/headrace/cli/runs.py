"""`headrace summary`, `compare`, `audit`, `verify` and `tokens`: print what run directories contain.

Imports that take a second (the types of run files) are inside the functions that need them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import msgspec

from headrace.api.run import Run
from headrace.cli.common import add_format, output_console, positive
from headrace.observe.chart_export import check_format, convert_plots
from headrace.observe.summary import format_summary, write_summary

DEFAULT_TOKENS = 20
PIPE_WIDTH = 200


def configure_summary(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and write nothing")
    add_format(parser)


def run_summary(arguments: argparse.Namespace) -> int:
    check_format(arguments.format)
    run = Run(arguments.run)
    if arguments.json:
        print(msgspec.json.encode(run.summary()).decode())
    else:
        print(format_summary(run.files, write_summary(run.files)))
        for path in convert_plots([run.files.plot] if run.files.plot.exists() else [], arguments.format):
            print(f"wrote {path}")
    return 0


def configure_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="run directories; the others are compared with the first")
    add("--metric", metavar="NAME", help="any of metrics.jsonl [reward/all/mean, else loss]")
    add(
        "--evaluation",
        metavar="DIR",
        type=Path,
        help="the output of `headrace eval` on these runs, instead of the evaluations that they saved",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--output", metavar="DIR", type=Path, help="write a page with curves, and the JSON, there")
    add_format(parser)
    parser.epilog = "Runs that differ only in their seed are one variant. See docs/how-to/comparing.md."


def run_compare(arguments: argparse.Namespace) -> int:
    from headrace.tools.compare.comparison import compare_runs
    from headrace.tools.compare.view import format_comparison, write_page

    check_format(arguments.format)
    compared = compare_runs(arguments.runs, arguments.metric, arguments.evaluation)
    files = write_page(compared, arguments.output) if arguments.output is not None else []
    files += convert_plots(files, arguments.format)
    if arguments.json:
        print(msgspec.json.encode(compared.comparison).decode())
        return 0
    print(format_comparison(compared.comparison))
    if files:
        print(f"\nwrote {', '.join(map(str, files))}")
    return 0


def configure_audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")


def run_audit(arguments: argparse.Namespace) -> int:
    report = Run(arguments.run).audit()
    print(report)
    return 1 if report.problems else 0


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")


def run_verify(arguments: argparse.Namespace) -> int:
    verification = Run(arguments.run).verify()
    for damage in verification.damages:
        print(f"{damage.problem.rstrip('.')}. {damage.recovery}".rstrip())
    places = Counter(path.parts[0] if len(path.parts) > 1 else str(path) for path in verification.without_digest)
    shown = [f"{place} ({count} files)" if count > 1 else place for place, count in places.items()]
    print(f"{len(verification.whole)} files match their digests, {len(verification.damages)} are damaged")
    if shown:
        print(f"without a digest: {', '.join(shown)}")
    return 1 if verification.damages else 0


def configure_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument("step", metavar="STEP", type=int, nargs="?", help="a step whose tokens were exported [newest]")
    parser.add_argument("--sample", metavar="N", type=int, help="only this sample of the batch, token by token")
    parser.add_argument(
        "--top", metavar="K", type=positive, help=f"only the K tokens with the largest gradients [{DEFAULT_TOKENS}]"
    )


def run_tokens(arguments: argparse.Namespace) -> int:
    from headrace.config.base import ConfigError
    from headrace.launch.saved_config import read_rl_run, run_directory
    from headrace.observe.token_view import largest, read_tokens, render
    from headrace.text.hub import model_directory
    from headrace.text.tokenizer import Tokenizer

    config = read_rl_run(arguments.run)
    header, tokens = read_tokens(run_directory(config).tokens, arguments.step, arguments.sample)
    if arguments.top is not None or arguments.sample is None:
        tokens = largest(tokens, arguments.top or DEFAULT_TOKENS)
    if config.model.name is None:
        raise ConfigError("not set, and text needs the model's tokenizer", key="model.name", file=arguments.run)
    tokenizer = Tokenizer(model_directory(config.model.name))
    output_console(PIPE_WIDTH).print(render(header, tokens, tokenizer.decode))
    return 0
