"""Command lines tried in a process of their own each, which cost a fork instead of a start of Python.

A server imports the command line once. Each attempt is a fork of it that runs the real `main` in a directory, and
reports the exit code, what was printed, the fields of the error, the processes that it tried to start, and whether
torch was imported. The server then imports what modules of ours the attempt imported, for those that follow. Run as a
program, this module is the server; `Attempts` is its client.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STARTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.spawn", "os.system"})
"""Audit events of a process that is started."""
TIMEOUT_S = 60
"""An attempt that takes longer is killed."""


@dataclass(frozen=True)
class Problem:
    """The fields of one `BadInput`."""

    fact: str
    key: str | None
    value: Any
    fix: str | None
    file: str | None
    line: int | None


@dataclass(frozen=True)
class Outcome:
    """What came of a command line."""

    code: int
    out: str
    err: str
    problems: tuple[Problem, ...]
    """None where the command line was refused by argparse, or nothing was wrong."""
    started: tuple[str, ...]
    """Audit events of processes that were started."""
    imported_torch: bool


class Attempts:
    """The client of the server."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables`: environment variables on top of those of the tests."""
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.attempts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **variables},
        )

    def try_command(self, argv: Sequence[str], directory: Path) -> Outcome:
        """Run `headrace ARGV` in a directory."""
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {"argv": list(argv), "directory": str(directory)}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        outcome = json.loads(self._server.stdout.readline())
        problems = tuple(Problem(**problem) for problem in outcome.pop("problems"))
        return Outcome(**outcome | {"started": tuple(outcome["started"]), "problems": problems})

    def close(self) -> None:
        self._server.communicate(timeout=60)


def serve(requests: Iterator[str]) -> None:
    """Answer each line of JSON with another, from a fork that does what it says."""
    from headrace.config.sft import SftConfig
    from headrace.runfile.run import RunConfig
    from headrace.text.renderer import make_renderer
    from headrace.text.tokenizer import Tokenizer
    from headrace.trainer.tiny import write_tiny_settings

    with tempfile.TemporaryDirectory() as directory:
        write_tiny_settings(Path(directory))
        make_renderer(directory, Tokenizer(directory))  # the first one imports those of all families
    for kind in (RunConfig, SftConfig):
        kind.model_rebuild()  # its validators
    for line in requests:
        assert "torch" not in sys.modules
        gc.freeze()
        imported, answer = os.pipe()
        child = os.fork()
        if not child:
            before = set(sys.modules)
            signal.alarm(TIMEOUT_S)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                outcome = attempt(**json.loads(line))
            outcome |= {"out": out.getvalue(), "err": err.getvalue()}
            os.write(1, (json.dumps(outcome, default=str) + "\n").encode())
            if not outcome["imported_torch"]:
                ours = [name for name in sys.modules if name.startswith("headrace.") and name not in before]
                os.write(answer, " ".join(ours).encode())
            os._exit(0)
        os.close(answer)
        with open(imported) as names:
            for name in names.read().split():
                importlib.import_module(name)
        if status := os.waitpid(child, 0)[1]:
            lost = Outcome(status, "", f"ended without an answer: wait status {status}", (), (), False)
            print(json.dumps(asdict(lost)), flush=True)


def attempt(argv: list[str], directory: str) -> dict[str, Any]:
    """Run the command line in this process, which is given up afterwards."""
    from headrace.cli import main as command_line
    from headrace.cli.main import Explanation, explain
    from headrace.errors import BadInput

    started: list[str] = []
    problems: list[BadInput] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            started.append(f"{event} {arguments}")

    def note(error: BaseException) -> Explanation | None:
        if isinstance(error, BadInput):
            problems.extend(error.problems)
        return explain(error)

    os.chdir(directory)
    sys.argv = ["headrace", *argv]
    command_line.explain = note  # type: ignore[attr-defined]
    sys.addaudithook(watch)
    try:
        code = command_line.main(argv)
    except SystemExit as error:  # argparse, or a request to stop
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        code = 1
        traceback.print_exc()
    names = ("fact", "key", "value", "fix", "file", "line")
    return {
        "code": code,
        "problems": [{name: getattr(problem, name) for name in names} for problem in problems],
        "started": started,
        "imported_torch": "torch" in sys.modules,
    }


if __name__ == "__main__":
    serve(iter(sys.stdin))
