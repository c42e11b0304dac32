"""`headrace env` and `headrace --version`: installed versions and the machine, for bug reports.

Everything is read without importing torch. Of environment variables only those of `VARIABLES` are shown, whose values
are numbers and lists of devices; no address, user name or key appears in a report.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from headrace import __version__
from headrace.machine import HostMemory, cache_directory, usable_cores

VARIABLES = {
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_NUM_NODES",
    "TOKENIZERS_PARALLELISM",
    "WORLD_SIZE",
}
PLAIN_VALUE = re.compile(r"[\w.,:+-]{0,100}")
"""Values that are shown. URLs, paths and key files do not match."""
PROGRAMS = ("bwrap", "gcc", "nvcc", "sbatch")
OS_RELEASE = (Path("/etc/os-release"), Path("/usr/lib/os-release"))
NOT_INSTALLED = "not installed"


def versions() -> dict[str, str]:
    """Return the versions that decide how a run behaves, by name."""
    torch, cuda = version_and_cuda_of_torch()
    return {
        "headrace": __version__,
        "python": platform.python_version(),
        "torch": torch,
        "cuda": cuda,
        "transformers": version_of("transformers"),
        "vllm": version_of("vllm"),
    }


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def version_and_cuda_of_torch() -> tuple[str, str]:
    """Return torch's version, with its build, and the CUDA version it was built for, from the file that records both.

    The package's metadata may lack the build: wheels for aarch64 are 2.10.0 there, and 2.10.0+cpu in the file.
    """
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return NOT_INSTALLED, NOT_INSTALLED
    recorded = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    return recorded["__version__"], recorded["cuda"] or "none (a CPU build of torch)"


def configure_env(parser: argparse.ArgumentParser) -> None:
    pass


def run_env(arguments: argparse.Namespace) -> int:
    for title, rows in (
        ("versions", versions().items()),
        ("machine", machine()),
        ("packages", packages()),
        ("environment variables", variables()),
    ):
        print(title, *(f"  {name:<22} {value}" for name, value in rows), sep="\n")
    return 0


def machine() -> Iterator[tuple[str, str]]:
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    if any(path.exists() for path in OS_RELEASE):
        yield "distribution", platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    yield "C library", " ".join(platform.libc_ver()).strip() or "unknown"
    yield "cores", f"{usable_cores()} of {os.cpu_count()}"
    yield "memory", f"{HostMemory().total() / 2**30:.1f} GiB"
    yield "free disk", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.0f} GiB here"
    cache = cache_directory()
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    yield "cache", "writable" if os.access(existing, os.W_OK) else "not writable"
    yield "programs", ", ".join(filter(shutil.which, PROGRAMS)) or "none of " + ", ".join(PROGRAMS)
    yield "installed", "from a checkout" if (Path(__file__).parents[3] / "pyproject.toml").is_file() else "as a package"
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        failed = [f"nvidia-smi failed with status {done.returncode}"]
        for number, gpu in enumerate(failed if done.returncode else done.stdout.splitlines()):
            yield f"GPU {number}", gpu


def packages() -> Iterator[tuple[str, str]]:
    """Yield the installed packages that Headrace names as dependencies, those of its extras included."""
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in metadata.requires("headrace") or ()}
    for name in sorted(names):
        if (installed := version_of(name)) != NOT_INSTALLED:
            yield name, installed


def variables() -> Iterator[tuple[str, str]]:
    for name in sorted(VARIABLES & os.environ.keys()):
        value = os.environ[name]
        yield name, value if PLAIN_VALUE.fullmatch(value) else "set, not shown"
