"""The functions of `kernels.c` and `products.c`, compiled once per process by the machine's C compiler, for its CPU.

Compilation takes about a second, and no file is kept that could be out of date. The kernels have a thread pool of their
own (see `thread_pool.c`): OpenMP's threads, which torch uses, wait for each other, however busy the cores are.
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

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.c", "products.c", "thread_pool.c")]
FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"),
    *("-pthread", "-fPIC", "-shared"),
)
COMPILERS = ("gcc", "cc", "clang")
"""In the order in which they are tried."""
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
    "multiply": (Rows, _pointer, _pointer, _pointer, _number, _number, _number, _threads),
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
    if not compilers:
        log.info("layers are not fused: there is no C compiler")
        return None
    errors = []
    for compiler in compilers:
        try:
            return _compile(compiler)
        except (OSError, subprocess.SubprocessError) as error:
            output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            errors.append(f"{compiler} failed: {output.strip()[-500:]}")
    log.warning("layers are not fused: %s", "; ".join(errors))
    return None


def _compile(compiler: str) -> ctypes.CDLL:
    """Compile the kernels; raises OSError also if the temporary folder does not allow execution."""
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "kernels.so")
        command = [compiler, *FLAGS, *map(str, SOURCES), "-o", library, "-lm"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
        loaded = ctypes.CDLL(library)
    for name, signature in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = signature, None
    loaded.panel_width.restype = _number
    return loaded
