"""`headrace replay`: train a step of a run again, and compare it with what the run recorded."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from headrace.cli.common import output_console, positive, progress_line
from headrace.errors import BadInput
from headrace.machine import VISIBLE_GPUS_VAR
from headrace.tools.replay.replay import DEFAULT_ROLLOUTS, DEFAULT_TOLERANCE, replay_step
from headrace.tools.replay.view import render

PIPE_WIDTH = 160


def configure_replay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN|BUNDLE", type=Path, help="the run directory, or a file that --bundle wrote")
    add("step", metavar="STEP", type=positive, nargs="?", help="the step of the run; a bundle has one")
    add("--bundle", metavar="FILE", type=Path, help="write the step as one file, for another machine")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one")
    add(
        "--tolerance",
        metavar="X",
        type=float,
        default=DEFAULT_TOLERANCE,
        help=f"largest error that counts as the same [{DEFAULT_TOLERANCE:g}]",
    )
    add("--top", metavar="K", type=positive, default=DEFAULT_ROLLOUTS, help=f"rollouts to show [{DEFAULT_ROLLOUTS}]")
    add("--json", action="store_true", help="print one JSON object")
    parser.epilog = (
        "Exit code: 0 if the step is the same within the tolerance, 1 if it differs or nothing was recorded, 2 if it "
        "cannot be replayed. Other settings: --trainer.key value, for example --trainer.model.dtype float32"
    )


def run_replay(arguments: argparse.Namespace) -> int:
    if arguments.device == "cpu":
        os.environ[VISIBLE_GPUS_VAR] = ""  # before torch is imported
    elif arguments.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise BadInput("torch finds no GPU", key="--device", value="cuda", fix="Use --device cpu.")
    with progress_line() as progress:
        report = replay_step(
            arguments.run,
            arguments.step,
            overrides=arguments.overrides,
            tolerance=arguments.tolerance,
            top=arguments.top,
            bundle=arguments.bundle,
            progress=progress,
        )
    if report.platform.device != "cpu":
        from headrace.trainer.ranks import destroy_process_group

        destroy_process_group()
    if arguments.json:
        print(msgspec.json.encode({"verdict": report.verdict, **msgspec.to_builtins(report)}).decode())
    else:
        output_console(PIPE_WIDTH).print(render(report))
        if arguments.bundle is not None:
            print(f"wrote {arguments.bundle}, {arguments.bundle.stat().st_size / 1e6:.1f} MB")
    return 0 if report.verdict in ("bit-equal", "within tolerance") else 1
