"""The `headrace` command. Each subcommand is a module with `configure` and `run`; heavy imports happen in `run`."""

from __future__ import annotations

import argparse
import difflib
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from headrace import __version__
from headrace.cli import (
    audit,
    chat,
    check_algorithm,
    compare,
    config,
    eval,
    export,
    init_model,
    new,
    orchestrator,
    probe,
    pull,
    push,
    rescore,
    rl,
    serve,
    sft,
    summary,
    sweep,
    tokens,
    trainer,
)
from headrace.cli.arguments import RUN_FILES, separate_overrides
from headrace.cli.errors import explain
from headrace.errors import BadInput

COMMANDS: dict[str, ModuleType] = {
    "rl": rl,
    "sft": sft,
    "serve": serve,
    "chat": chat,
    "new": new,
    "probe": probe,
    "check-algorithm": check_algorithm,
    "orchestrator": orchestrator,
    "trainer": trainer,
    "eval": eval,
    "summary": summary,
    "compare": compare,
    "sweep": sweep,
    "config": config,
    "audit": audit,
    "rescore": rescore,
    "export": export,
    "push": push,
    "pull": pull,
    "tokens": tokens,
    "init-model": init_model,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 failed, 2 cannot be done as asked, 128 + n ended by signal n."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        code = int(COMMANDS[arguments.command].run(arguments))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and output_has_no_reader():
            return 128 + signal.SIGPIPE
        explanation = explain(error)
        if explanation is None:
            raise
        print(f"headrace: {explanation.message}", file=sys.stderr)
        return explanation.exit_code


def unknown_command(word: str) -> BadInput:
    """Explain a misspelt command, or a run file without one."""
    if Path(word).suffix in RUN_FILES:
        return BadInput("a run file, not a command", key="COMMAND", value=word, fix=f"Write: headrace rl {word}")
    near = difflib.get_close_matches(word.lower().replace("_", "-"), COMMANDS, n=1)
    fix = f"Did you mean headrace {near[0]}?" if near else "headrace --help lists the commands."
    return BadInput("unknown command", key="COMMAND", value=word, fix=fix)


def output_has_no_reader() -> bool:
    """Whether whoever read the output has seen enough, as `| head` has; what is left of it then goes nowhere."""
    output = sys.stdout.fileno()
    watch = select.poll()
    watch.register(output, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def parse(argv: Sequence[str]) -> argparse.Namespace:
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise unknown_command(argv[0])
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Asynchronous reinforcement learning and distillation for language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        first_line = (module.__doc__ or "").splitlines()[0].removeprefix(f"`headrace {name}`: ")
        command = commands.add_parser(name, help=first_line, description=first_line, allow_abbrev=False)
        module.configure(command)
    dotted = bool(argv) and argv[0] in ("probe", "check-algorithm", "rescore", "chat")
    overridden = dotted or (argv and argv[0] in ("rl", "sft", "serve", "sweep"))
    own, overrides = separate_overrides(argv, dotted=dotted) if overridden else (list(argv), [])
    return parser.parse_args(own, argparse.Namespace(overrides=overrides))
