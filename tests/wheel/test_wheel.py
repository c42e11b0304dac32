"""The wheel in an environment of its own, outside of the checkout: what a user of `pip install headrace` has."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
MAX_WHEEL_BYTES = 5_000_000
BUILD = [sys.executable, "-m", "hatchling", "build", "-d"]


@dataclass(frozen=True)
class Installation:
    """The environment with the wheel, and the folder in which its commands run."""

    environment: Path
    folder: Path
    files_before: set[Path]

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of the environment to success; returns what it printed."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        variables["HEADRACE_CACHE"] = str(self.folder / "cache")  # empty, so that the demo makes its first model
        done = subprocess.run(
            [self.environment / "bin" / program, *arguments],
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    def files(self) -> set[Path]:
        """Return everything in the environment, except for the bytecode of packages that were imported."""
        return {path for path in self.environment.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([*BUILD, str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The locked packages, with the CPU build of torch, then the wheel, for which pip finds everything installed."""
    install: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "install.py"))
    environment = tmp_path_factory.mktemp("environment") / "venv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_COMPILE", "0")  # which means "do not compile": only what is imported is, then
        install["create"](environment)
        install["install_torch"](environment, install["RUNTIME_LOCK"])
        install["install_lock"](environment, install["RUNTIME_LOCK"], "runtime packages")
        bare = Installation(environment, tmp_path_factory.mktemp("work"), set())
        before = bare.files()
        install["pip"](environment, "--no-index", str(wheel))
    return Installation(environment, bare.folder, before)


def test_the_wheel_is_small_and_has_what_the_checkout_has(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    packed = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files", "src", "examples"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    expected = {f"headrace/{name}".replace("headrace/src/", "") for name in tracked.stdout.decode().split()}
    assert {name for name in packed if ".dist-info/" not in name} == expected
    assert "headrace/py.typed" in packed


def test_the_source_distribution_builds_the_same_wheel(distributions: Path, wheel: Path, tmp_path: Path) -> None:
    (source,) = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    subprocess.run([*BUILD, str(tmp_path), "-t", "wheel"], cwd=unpacked, check=True)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_it_is_imported_from_the_environment_with_the_cpu_build_of_torch(installation: Installation) -> None:
    printed = installation.run("python", "-c", "import headrace, torch; print(headrace.__file__, torch.__version__)")
    file, torch = printed.split()
    assert Path(file).is_relative_to(installation.environment)
    assert torch.endswith("+cpu")
    assert f"torch {torch}\n" in installation.run("headrace", "--version")
    installation.run("pip", "check")


def test_the_demo_trains(installation: Installation) -> None:
    installation.run("headrace", "demo", "--max_steps", "5")
    assert (installation.folder / "outputs" / "reverse-text" / "model" / "model.safetensors").is_file()
    installation.run("headrace", "audit", "outputs/reverse-text")


def test_a_new_environment_is_probed_and_trained(installation: Installation) -> None:
    installation.run("headrace", "new", "environment", "x")
    installation.run("headrace", "probe", "x:x")
    installation.run("headrace", "rl", "x.toml", "--max_steps", "3")
    assert (installation.folder / "outputs" / "x" / "model" / "model.safetensors").is_file()


def test_an_uninstall_leaves_nothing(installation: Installation) -> None:
    installation.run("pip", "uninstall", "--yes", "headrace")
    assert installation.files() == installation.files_before
    assert not list(installation.environment.rglob("*headrace*"))
