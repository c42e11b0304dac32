"""The functions of `kernels.c` and `products.c`, compiled by the machine's C compiler, for its CPU.

Compilation takes more than a second, so the library is kept in the cache directory, under a name that has a digest of
all that it depends on and one of its content. The kernels have a thread pool of their own (see `thread_pool.c`):
OpenMP's threads, which torch uses, wait for each other, however busy the cores are.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch import Tensor

from headrace.machine import cache_directory

log = logging.getLogger(__name__)

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.c", "products.c", "thread_pool.c")]
HEADER = Path(__file__).with_name("kernels.h")
CPU_INFO = Path("/proc/cpuinfo")
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
            return _load_compiled(compiler) or _compile(compiler)
        except (OSError, subprocess.SubprocessError) as error:
            output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            errors.append(f"{compiler} failed: {output.strip()[-500:]}")
    log.warning("layers are not fused: %s", "; ".join(errors))
    return None


def _compile(compiler: str) -> ctypes.CDLL:
    """Compile the kernels and keep them; raises OSError also if no folder allows execution."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(library), "-lm"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
        loaded = _load(library)
        content = library.read_bytes()
    target = _cache_folder() / f"{_digest_of_inputs(compiler)}-{_digest(content)}.so"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as draft:
            draft.write(content)
        os.chmod(draft.name, 0o644)
        os.replace(draft.name, target)
    except OSError as error:  # the next process compiles them, too
        log.info("compiled kernels are not kept: %s", error)
    return loaded


def _load_compiled(compiler: str) -> ctypes.CDLL | None:
    """Load the library that was compiled from the same inputs, if its content is what was written."""
    for library in _cache_folder().glob(f"{_digest_of_inputs(compiler)}-*.so"):
        with suppress(OSError):  # another user's, or the folder does not allow execution
            if library.stem.endswith(f"-{_digest(library.read_bytes())}"):
                return _load(library)
    return None


def _cache_folder() -> Path:
    return cache_directory() / "compiled" / "c"


def _digest_of_inputs(compiler: str) -> str:
    """Return a digest of sources, flags, compiler and CPU, for whose instructions the code is."""
    resolved = Path(compiler).resolve()
    facts = resolved.stat()
    first_cpu = CPU_INFO.read_text().split("\n\n")[0].splitlines() if CPU_INFO.is_file() else []
    # Other lines change from one reading to the next, such as the frequency.
    cpu = [line for line in first_cpu if line.lower().startswith(("flags", "features", "model", "cpu part", "vendor"))]
    inputs = (FLAGS, resolved, facts.st_size, facts.st_mtime_ns, platform.machine(), platform.processor(), cpu)
    return _digest(repr(inputs).encode(), *(path.read_bytes() for path in (*SOURCES, HEADER)))


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def _load(library: Path) -> ctypes.CDLL:
    """Load a compiled library, and declare the arguments of its functions."""
    loaded = ctypes.CDLL(str(library))
    for name, signature in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = signature, None
    loaded.panel_width.restype = _number
    return loaded
