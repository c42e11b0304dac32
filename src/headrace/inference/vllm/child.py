"""The program of the child process, in vLLM's interpreter: vLLM's server, which ends with our process.

Versions of vLLM need different options. They are chosen here, from the files of the installed version, which only this
interpreter can find. Nothing of vLLM is imported before its server.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import signal
import sys
import threading
from pathlib import Path

SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Run with the arguments: file descriptor to watch, temporary directory, and those of vLLM's server."""
    lifeline, directory = int(sys.argv.pop(1)), sys.argv.pop(1)
    os.set_inheritable(lifeline, False)
    threading.Thread(target=end_with, args=(lifeline, directory), name="lifeline", daemon=True).start()
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{sys.executable} has no vLLM. Set inference.vllm.python to an interpreter that has it.")
    adapt(Path(spec.submodule_search_locations[0]))
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def end_with(lifeline: int, directory: str) -> None:
    """Kill the process group when the other end of the pipe is closed because its process has ended."""
    os.read(lifeline, 1)  # nothing is ever written
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # immediately: a successor may need the GPUs


def adapt(vllm: Path) -> None:
    """Add the options that this version of vLLM needs."""
    if _mentions(vllm, "cli_args.py", "enable_scale_out"):
        sys.argv.append("--enable-scale-out")  # earlier versions always have the token route
    if not _mentions(vllm, "api_router.py", "/update_weight_version"):
        # It does not report which weights sampled a token: our worker counts instead, which needs this runner.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def _mentions(vllm: Path, file_name: str, word: str) -> bool:
    return any(word in path.read_text() for path in (vllm / "entrypoints").rglob(file_name))


if __name__ == "__main__":
    main()
