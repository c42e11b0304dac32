"""The `headrace` command: parses the command line and runs a subcommand.

A subcommand NAME is two functions, `configure_NAME` and `run_NAME`, in the module that `COMMANDS` names; only the
module of the chosen subcommand is imported.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from headrace.cli.common import RUN_FILES, separate_overrides
from headrace.errors import BAD_INPUT, FENCED, RESTART_RUN, BadInput, Failure, Fenced, Repaired, suggest_similar
from headrace.safe_text import CONTINUATION, escape_output

FAILED = 1

EXPLAINED_ERRNOS = frozenset({errno.EACCES, errno.EADDRINUSE, errno.EIO, errno.ENOTDIR, errno.EPERM, errno.EROFS})
"""Errors of the operating system that are explained by their text and path."""
FULL_DISK = ("No space left on device", "Disk quota exceeded", "database or disk is full")
"""Texts of a full disk in errors that a library has wrapped."""
GPU_MEMORY_ADVICE = (
    "Lower inference.kv_cache_gb, seq_len or trainer.memory_gb, keep the optimizer's state in CPU memory "
    "(trainer.optim.offload_state), or train an adapter ([trainer.lora]); --dry-run shows the plan of its memory."
)


class Command(NamedTuple):
    module: str
    help: str
    overrides: Literal["", "all", "dotted"] = ""
    """Which unknown options are overrides of the configuration: none, all, or those with a dot (`--section.key`)."""


COMMANDS = {
    "demo": Command("training", "train a tiny model in a few minutes, without a GPU, and see its reward rise.", "all"),
    "rl": Command("training", "train a model with reinforcement learning; supervises the three processes.", "all"),
    "sft": Command("training", "train a model on examples.", "all"),
    "dpo": Command("training", "train a model on preference pairs: chosen and rejected completions.", "all"),
    "pairs": Command("pairs", "write preference pairs from the rollouts of a run."),
    "prepare": Command(
        "prepare", "check a run, resolve its model and data, write its directory; start nothing.", "all"
    ),
    "serve": Command("serve", "serve a model over HTTP, or the model of a run.", "all"),
    "chat": Command("chat", "chat with a model, the model of a run, or any OpenAI-compatible server.", "dotted"),
    "examples": Command("new", "list the example run files, or copy them."),
    "new": Command("new", "write the skeleton of an environment, with a test and run files."),
    "probe": Command("probe", "test an environment before training: hostile answers, prompts, rewards.", "dotted"),
    "check-algorithm": Command("check_algorithm", "test an algorithm with worked numbers and invariants.", "dotted"),
    "orchestrator": Command("processes", "start only the orchestrator of a run; it continues where its journal ends."),
    "trainer": Command("processes", "start only the trainer of a run of any kind."),
    "node": Command("node", "take part in a run of several hosts: run the processes that its launcher starts here."),
    "scale": Command("node", "change the number of inference servers of a run while it runs."),
    "eval": Command("eval", "evaluate finished models on an environment: accuracy, pass@k, format, lengths."),
    "summary": Command("runs", "summarize a run, as text or JSON."),
    "doctor": Command("doctor", "say what a run waits for, and what is wrong with it; live or after its end."),
    "view": Command("view", "show runs on a local web page: charts, rollouts, tokens, credit."),
    "compare": Command("runs", "compare runs: settings, results, and the significance of differences."),
    "manifest": Command("config", "write a run as objects of Kubernetes: a JobSet and what it needs.", "all"),
    "sweep": Command("sweep", "run a grid, a list or random values of any keys, with seeds, and report on it.", "all"),
    "config": Command("config", "print the resolved configuration of a run file, or explain a key."),
    "convert": Command("config", "translate a run file of prime-rl, or the settings of a TRL script."),
    "audit": Command("runs", "account for every prompt of a run, and check its journal and checkpoints."),
    "verify": Command("runs", "compare all files of a run with their digests."),
    "rescore": Command("rescore", "credit a run's saved rollouts with another algorithm; samples nothing.", "dotted"),
    "models": Command("models", "list the families of models, and what works with each."),
    "export": Command("models", "write a checkpoint as a Hugging Face model."),
    "push": Command("hub", "upload a run, a model, a checkpoint or a dataset to the Hugging Face hub."),
    "pull": Command("hub", "download a run, a model or a dataset from the Hugging Face hub."),
    "replay": Command("replay", "train a step of a run again, and compare it with what was recorded.", "dotted"),
    "tokens": Command("runs", "show the tokens of a training step with their effect on its gradient."),
    "init-model": Command("models", "write a new model with random weights."),
    "completion": Command("completion", "write a script that completes commands, options and keys in a shell."),
    "env": Command("env", "report versions and the machine, for bug reports; no secrets."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 failed, 2 invalid request, 128 + n ended by signal n."""
    escape_output()
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        code = run_command(arguments)
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
            print(traceback.format_exc().rstrip().replace("\n", CONTINUATION), file=sys.stderr)
            return FAILED
        print(f"headrace: {explanation.message}", file=sys.stderr)
        return explanation.exit_code


def output_has_no_reader() -> bool:
    """Return whether the output is a pipe that was closed, as by `| head`; further output is then discarded."""
    output = sys.stdout.fileno()
    watch = select.poll()
    watch.register(output, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def parse(argv: Sequence[str]) -> argparse.Namespace:
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        if Path(argv[0]).suffix in RUN_FILES:
            fix = f"Write: headrace rl {argv[0]}"
            raise BadInput("a run file, not a command", key="COMMAND", value=argv[0], fix=fix)
        name = argv[0].lower().replace("_", "-")
        fix = suggest_similar(name, COMMANDS, prefix="headrace ") or "headrace --help lists the commands."
        raise BadInput("unknown command", key="COMMAND", value=argv[0], fix=fix)
    parser, commands = make_parser()
    chosen = next((word for word in argv if word in COMMANDS), None)
    if chosen is None:
        return parser.parse_args(argv)
    _function("configure", chosen)(commands[chosen])
    kind = COMMANDS[chosen].overrides
    own, overrides = separate_overrides(argv, dotted=kind == "dotted") if kind else (list(argv), [])
    return parser.parse_args(own, argparse.Namespace(overrides=overrides))


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser, and those of the commands, which have no arguments yet."""
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Asynchronous reinforcement learning and distillation for language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=ShowVersions, nargs=0, help="print the versions that matter, and stop")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
    return parser, dict(commands.choices)


def configured(command: str) -> argparse.ArgumentParser:
    """Return the parser of one command, with its arguments."""
    parser = make_parser()[1][command]
    _function("configure", command)(parser)
    return parser


class ShowVersions(argparse.Action):
    """`--version`, which finds the versions only when it is used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from headrace.cli.env import versions

        print(*(f"{name} {version}" for name, version in versions().items()), sep="\n")
        parser.exit()


def run_command(arguments: argparse.Namespace) -> int:
    return int(_function("run", arguments.command)(arguments))


def _function(verb: str, command: str) -> Callable[..., Any]:
    module = importlib.import_module(f"headrace.cli.{COMMANDS[command].module}")
    return getattr(module, f"{verb}_{command.replace('-', '_')}")  # type: ignore[no-any-return]


class Explanation(NamedTuple):
    message: str
    exit_code: int


def explain(error: BaseException) -> Explanation | None:
    """Return a sentence and an exit code, or None if the traceback should be shown."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    is_full = any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in causes)
    if is_full or any(words in str(cause) for cause in causes for words in FULL_DISK):
        where = [str(cause.filename) for cause in causes if isinstance(cause, OSError) and cause.filename]
        where += [note for cause in causes for note in getattr(cause, "__notes__", ())]
        place = f" ({', '.join(dict.fromkeys(where))})" if where else ""
        advice = "free some and try again; a run that had begun continues with --resume"
        return Explanation(f"no space left on device{place}: {advice}", FAILED)
    # Errors of torch are recognized by name, because torch may not be imported.
    has_lost_rank = any(type(cause).__name__ in ("DistBackendError", "DistNetworkError") for cause in causes)
    if has_lost_rank or any(isinstance(cause, RuntimeError) and "gloo" in str(cause) for cause in causes):
        return Explanation("another rank is gone; what it said comes before this", FAILED)
    if type(error).__name__ == "OutOfMemoryError":
        return Explanation(f"the GPU is out of memory. {GPU_MEMORY_ADVICE} The error: {error}", FAILED)
    if isinstance(error, Fenced):
        return Explanation(str(error), FENCED)
    if isinstance(error, Repaired):
        return Explanation(f"{error}. Start the processes of the run again to continue", RESTART_RUN)
    if isinstance(error, Failure):
        return Explanation(str(error), BAD_INPUT if isinstance(error, BadInput) else FAILED)
    if isinstance(error, OSError) and error.errno in EXPLAINED_ERRNOS:
        return Explanation(f"{error.strerror}{f': {error.filename}' if error.filename else ''}", FAILED)
    return None
