"""`headrace compare`: runs beside each other: what differs, what they came to, and how sure the difference is."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli.arguments import add_format


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="run directories; the first is what others are held against"
    )
    parser.add_argument("--metric", metavar="NAME", help="any of metrics.jsonl [reward/all/mean, else loss]")
    parser.add_argument(
        "--evaluation",
        metavar="DIR",
        type=Path,
        help="what `headrace eval` wrote about these runs, instead of the evaluations that they saved",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output", metavar="DIR", type=Path, help="write a page with curves, and the JSON, there")
    add_format(parser)
    parser.epilog = "Runs that differ only in their seed are one variant. See docs/how-to/comparing.md."


def run(arguments: argparse.Namespace) -> int:
    import msgspec

    from headrace.observe.chart_export import check_format, convert_plots
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
