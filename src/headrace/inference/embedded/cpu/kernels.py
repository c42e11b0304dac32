"""The functions of `kernels.c`, compiled once per process by the machine's C compiler, for its CPU.

Compilation takes half a second, and no file is kept that could be out of date. The kernels use torch's threads, since a
second pool would compete for the cores: they are linked with the GNU OpenMP that torch has loaded (Linux only).
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
    *("-shared", "-nodefaultlibs", "-Wl,-z,defs"),  # no OpenMP but the one that is named
)
COMPILERS = ("gcc", "cc")
"""In the order in which they are tried. Clang fails: it links its own OpenMP, which torch has not loaded."""
COMPILE_TIMEOUT_S = 60

_number, _pointer, _float, _threads = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_int


class AttentionShape(ctypes.Structure):
    """`struct shape`: sizes and settings of a layer's attention."""

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
    """`struct rows`: one row of consecutive numbers per token."""

    _fields_ = (("first", _pointer), ("stride", _number))


NO_ROWS = Rows(None, 0)


def rows(states: Tensor) -> Rows:
    """Return the rows of a [1, token, number] tensor whose numbers are contiguous."""
    return Rows(states.data_ptr(), states.stride(1))


SIGNATURES = {
    "add_and_norm": (_pointer, Rows, _pointer, _float, _pointer, _number, _number, _threads),
    "gate_with_silu": (Rows, Rows, _pointer, _number, _number, _threads),
    "rotate_and_store": (
        *(ctypes.POINTER(AttentionShape), Rows, Rows, Rows),
        *(_pointer, _pointer, _pointer, _pointer, _pointer, _number, _threads),
    ),
    "attend": (
        *(ctypes.POINTER(AttentionShape), Rows, _pointer, _pointer),
        *(_pointer, _number, _pointer, _pointer, _number, _pointer, _number, _threads),
    ),
}


@cache
def load_kernels() -> ctypes.CDLL | None:
    """Compile and return the functions of `SIGNATURES`; None, with a log line, if they cannot be compiled."""
    compilers = list(filter(None, map(shutil.which, COMPILERS)))
    maps = Path("/proc/self/maps")
    loaded = maps.read_text().splitlines() if maps.exists() else []
    openmp = next((line[line.index("/") :] for line in loaded if "/libgomp" in line), None)
    if not compilers or openmp is None:
        log.info("layers are not fused: there is no %s", "GNU OpenMP in torch" if openmp is None else "C compiler")
        return None
    errors = []
    for compiler in compilers:
        try:
            return _compile(compiler, openmp)
        except (OSError, subprocess.SubprocessError) as error:
            output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            errors.append(f"{compiler} failed: {output.strip()[-500:]}")
    log.warning("layers are not fused: %s", "; ".join(errors))
    return None


def _compile(compiler: str, openmp: str) -> ctypes.CDLL:
    """Compile the kernels; raises OSError also if the temporary folder does not allow execution."""
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "kernels.so")
        command = [compiler, *FLAGS, str(SOURCE), "-o", library, openmp, "-lm", "-lc"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
        loaded = ctypes.CDLL(library)
    for name, signature in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = signature, None
    return loaded
