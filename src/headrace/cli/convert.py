"""`headrace convert`: a run file of another system as one of Headrace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace.errors import BadInput, shown_value


def configure_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a TOML of prime-rl; JSON, YAML or a script of TRL")
    parser.add_argument("--output", metavar="F", type=Path, help="write the run file there [standard output]")
    parser.add_argument("--from", dest="system", choices=("prime-rl", "trl"), help="its system [recognized by keys]")
    parser.epilog = "A script is read, not executed. What could not be taken over is listed key by key."


def run_convert(arguments: argparse.Namespace) -> int:
    from headrace.tools.convert.conversion import convert

    output = arguments.output
    rewards = Path("rewards.py") if output is None else output.with_name(f"{output.stem}_rewards.py")
    made = convert(arguments.file, arguments.system, rewards.name)
    if output is None:
        print(made.text(), end="")
    else:
        for path in (output, *([rewards] if made.rewards else [])):
            if path.exists():
                raise BadInput("the file exists", key="--output", value=path, fix="Move it, or choose another name.")
        output.write_text(made.text(), encoding="utf-8")
        if made.rewards:
            rewards.write_text(made.rewards, encoding="utf-8")
        print(f"wrote {output}{f' and {rewards}' if made.rewards else ''}")
    for notice in made.notices:
        print(f"headrace: {notice}", file=sys.stderr)
    for theirs, ours in made.renamed:
        print(f"headrace: {theirs} is {ours} here", file=sys.stderr)
    for key, value, reason in made.left_out:
        shown = "" if value is None else f" = {shown_value(value)}"
        print(f"headrace: not taken over: {key}{shown}: {reason}", file=sys.stderr)
    for problem in made.missing:
        print(f"headrace: to be added: {problem}", file=sys.stderr)
    return 0
