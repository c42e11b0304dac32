"""What our child process runs, in vLLM's own interpreter: vLLM's server, which ends when we do.

vLLM's versions differ in what must be asked for. That is settled here, from the files of the vLLM that is there, since
only this interpreter knows where they are. Nothing of vLLM is imported before its server is.
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
    """The arguments are the file descriptor to watch, our directory, and then the server's."""
    lifeline, room = int(sys.argv.pop(1)), sys.argv.pop(1)
    os.set_inheritable(lifeline, False)
    threading.Thread(target=end_with, args=(lifeline, room), name="lifeline", daemon=True).start()
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        sys.exit(f"{sys.executable} has no vLLM: name an interpreter that has it in inference.vllm.python")
    adapt(Path(found.submodule_search_locations[0]))
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def end_with(lifeline: int, room: str) -> None:
    """Kill our whole group when the other end of the pipe is closed: whoever holds it is gone, however that came."""
    os.read(lifeline, 1)  # nothing is ever written
    shutil.rmtree(room, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # at once: another may be started in our place, and needs the GPUs


def adapt(vllm: Path) -> None:
    """Ask for what this version does not give by itself."""
    if _mentions(vllm, "cli_args.py", "enable_scale_out"):
        sys.argv.append("--enable-scale-out")  # earlier versions have the token route always
    if not _mentions(vllm, "api_router.py", "/update_weight_version"):
        # Its answers do not tell which weights sampled what: our worker must count, and can in this runner.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def _mentions(vllm: Path, file_name: str, word: str) -> bool:
    return any(word in path.read_text() for path in (vllm / "entrypoints").rglob(file_name))


if __name__ == "__main__":
    main()
