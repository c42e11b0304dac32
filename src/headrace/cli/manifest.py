"""`headrace manifest`: a run as objects of Kubernetes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace.launch.manifest import manifest
from headrace.launch.own_code import add_code_folders
from headrace.launch.saved_config import kind_of
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig


def configure_manifest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="run files, merged left to right")
    parser.add_argument("--output", metavar="F", type=Path, help="write the manifest to this file [standard output]")
    parser.epilog = "Any key can be set on top of the files: --launch.kubernetes.image repository:tag"


def run_manifest(arguments: argparse.Namespace) -> int:
    add_code_folders(arguments.files)
    overrides = [*arguments.overrides, "--launch.on", "nodes"]
    config, notices = load(kind_of(arguments.files) or RunConfig, arguments.files, overrides)
    for notice in notices:
        print(f"headrace: {notice}", file=sys.stderr)
    text = manifest(config)
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text)
    return 0
