"""`kernels.c` as functions: compiled once for a process, by the compiler of the machine, for its very CPU.

That takes half a second, and no file is kept that could be out of date. Its threads are torch's: a second pool would
fight it for the cores. So it is linked with the GNU OpenMP that torch has loaded, which is known on Linux alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"),
    *("-shared", "-nodefaultlibs", "-Wl,-z,defs"),  # with the OpenMP that is named, and none that the compiler adds
)
COMPILERS = ("gcc", "cc")
"""In the order in which they are tried. Clang links its own OpenMP, which torch has not loaded: it fails."""
COMPILE_TIMEOUT_S = 60

_number, _pointer, _float, _threads = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_int


class Shape(ctypes.Structure):
    """`struct shape` of a layer's attention."""

    _fields_ = (
        ("query_heads", _number),
        ("key_heads", _number),
        ("dim", _number),
        ("window", _number),
        ("scaling", _float),
        ("eps", _float),
        ("query_norm", _pointer),
        ("key_norm", _pointer),
    )


class Rows(ctypes.Structure):
    """`struct rows`."""

    _fields_ = (("first", _pointer), ("stride", _number))


NOTHING = Rows(None, 0)


def rows(states: Tensor) -> Rows:
    """[1, token, number], where numbers lie side by side."""
    return Rows(states.data_ptr(), states.stride(1))


SIGNATURES = {
    "add_and_norm": (_pointer, Rows, _pointer, _float, _pointer, _number, _number, _threads),
    "gate_with_silu": (Rows, Rows, _pointer, _number, _number, _threads),
    "rotate_and_store": (
        *(ctypes.POINTER(Shape), Rows, Rows, Rows),
        *(_pointer, _pointer, _pointer, _pointer, _pointer, _number, _threads),
    ),
    "attend": (
        *(ctypes.POINTER(Shape), Rows, _pointer, _pointer),
        *(_pointer, _number, _pointer, _pointer, _number, _pointer, _number, _threads),
    ),
}


@cache
def kernels() -> ctypes.CDLL | None:
    """The functions of `SIGNATURES`; None, and a line in the log, where they cannot be had."""
    compilers = list(filter(None, map(shutil.which, COMPILERS)))
    openmp = _loaded_openmp()
    if not compilers or openmp is None:
        log.info("layers are not fused: there is no %s", "GNU OpenMP in torch" if openmp is None else "C compiler")
        return None
    problems = []
    for compiler in compilers:
        try:
            return _compile(compiler, openmp)
        except (OSError, subprocess.SubprocessError) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            problems.append(f"{compiler} failed: {said.strip()[-500:]}")
    log.warning("layers are not fused: %s", "; ".join(problems))
    return None


def _compile(compiler: str, openmp: str) -> ctypes.CDLL:
    """Return the functions. Raises OSError also where nothing may be executed out of the temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "kernels.so")
        command = [compiler, *FLAGS, str(SOURCE), "-o", library, openmp, "-lm", "-lc"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
        loaded = ctypes.CDLL(library)
    for name, signature in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = signature, None
    return loaded


def _loaded_openmp() -> str | None:
    """The file of the GNU OpenMP that this process has loaded."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return next((line[line.index("/") :] for line in lines if "/libgomp" in line), None)
