"""`headrace view`: a local web page over a run directory, or over all runs of a folder."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure_view(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "path",
        metavar="RUN",
        type=Path,
        nargs="?",
        default=Path("outputs"),
        help="a run, or a folder of runs [outputs]",
    )
    add("--port", type=int, default=0, help="the port to listen on [any free port]")
    add("--host", default="127.0.0.1", help="the address to listen on [127.0.0.1: this machine only]")
    add("--export", metavar="DIR", type=Path, help="write the page as files that open without a server")
    add("--no-browser", action="store_true", help="print the URL only")


def run_view(arguments: argparse.Namespace) -> int:
    from headrace.tools.view.runs import RunFolder

    folder = RunFolder(arguments.path)
    if arguments.export is not None:
        from headrace.tools.view.export import export

        count = export(folder, arguments.export)
        print(f"wrote {count} files; open {arguments.export / 'index.html'}")
        return 0
    from headrace.tools.view.server import serve

    serve(folder, arguments.host, arguments.port, not arguments.no_browser, lambda url: print(url, flush=True))
    return 0
