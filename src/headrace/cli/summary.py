"""`headrace summary`: what a run came to, for people or as JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli.arguments import add_format


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and write nothing")
    add_format(parser)


def run(arguments: argparse.Namespace) -> int:
    import msgspec

    from headrace.launch.run_directory import find_run
    from headrace.observe.chart_export import check_format, convert_plots
    from headrace.observe.summary import summarize, text, write_summary
    from headrace.transport.run_dir import RunDir

    check_format(arguments.format)
    run = RunDir(find_run(arguments.run))
    if arguments.json:
        print(msgspec.json.encode(summarize(run)).decode())
    else:
        print(text(run, write_summary(run)))
        for path in convert_plots([run.plot] if run.plot.exists() else [], arguments.format):
            print(f"wrote {path}")
    return 0
