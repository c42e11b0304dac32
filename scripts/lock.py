"""Write the locks: exact versions of everything that pyproject.toml's dependencies bring in.

Resolved by pip in a fresh virtual environment. The packages already locked keep their versions where pyproject.toml
allows it; with `--upgrade` the newest are taken. One lock serves every supported Python and machine: that no package
is needed on some of them only is checked here from the packages' own metadata.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

from install import (
    CLIENTS_LOCK,
    DEV_LOCK,
    RAY_LOCK,
    ROOT,
    RUNTIME_LOCK,
    TRITON_LOCK,
    VIEW_LOCK,
    InstallError,
    Stage,
    create,
    install_torch,
    locked,
    run,
)
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BUILD = ["editables"]
"""What the build backend needs for an editable install, besides itself."""
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64"))


def main() -> None:
    upgrade = sys.argv[1:] == ["--upgrade"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runtime = [*project["project"]["dependencies"], *project["build-system"]["requires"], *BUILD]
    dev = [*runtime, *project["project"]["optional-dependencies"]["dev"]]
    ray = [*runtime, *project["project"]["optional-dependencies"]["ray"]]
    triton = [*runtime, *project["project"]["optional-dependencies"]["triton-tests"]]
    view = [*runtime, *project["project"]["optional-dependencies"]["view-tests"]]
    locks = (RUNTIME_LOCK, DEV_LOCK, RAY_LOCK, TRITON_LOCK, VIEW_LOCK)
    known = "".join(f"{lock.read_text()}\n" for lock in locks if lock.exists() and not upgrade)
    known_clients = CLIENTS_LOCK.read_text() if CLIENTS_LOCK.exists() and not upgrade else ""
    torch = locked(RUNTIME_LOCK)["torch"]  # moved by hand: the tested version is part of the design
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch) / "venv"
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text(known)
        create(environment)
        pins = Path(scratch) / "torch.txt"
        pins.write_text(f"torch=={torch}\n")
        install_torch(environment, pins)
        remove_bundled(environment)
        for what, requirements in (
            ("runtime", runtime),
            ("test", dev),
            ("Ray's", ray),
            ("Triton's", triton),
            ("a browser's", view),
        ):
            with Stage(f"resolving {what} packages"):
                resolve(environment, "--constraint", str(constraints), "--constraint", str(pins), *requirements)
        found = {canonicalize_name(d.name): d for d in distributions(path=[str(site_packages(environment))])}
        needed, *more = (closure(requirements, found) for requirements in (runtime, dev, ray, triton, view))
        versions = {name: d.version.partition("+")[0] for name, d in found.items()}
    lock_clients(project["project"]["optional-dependencies"]["client-tests"], known_clients)
    write(RUNTIME_LOCK, "Everything Headrace needs to run", {name: versions[name] for name in needed})
    for lock, what, names in (
        (DEV_LOCK, "What tests and checks need", more[0]),
        (RAY_LOCK, "Ray and its packages", more[1]),
        (TRITON_LOCK, "Triton, whose interpreter runs kernels on a CPU,", more[2]),
        (VIEW_LOCK, "What drives a browser and executes a notebook", more[3]),
    ):
        write(lock, f"{what} besides requirements.lock", {name: versions[name] for name in names - needed})


def lock_clients(requirements: list[str], known: str) -> None:
    """Lock the clients of the server in an environment of their own, which may not contain torch."""
    with tempfile.TemporaryDirectory() as scratch:
        environment, constraints = Path(scratch) / "venv", Path(scratch) / "constraints.txt"
        constraints.write_text(f"{known}\ntorch==0\n")
        create(environment)
        remove_bundled(environment)
        with Stage("resolving packages of clients"):
            resolve(environment, "--constraint", str(constraints), *requirements)
        found = {canonicalize_name(d.name): d for d in distributions(path=[str(site_packages(environment))])}
        names = closure(requirements, found)
        write(CLIENTS_LOCK, "The clients of `make test-clients`", {name: found[name].version for name in names})


def remove_bundled(environment: Path) -> None:
    """Remove the pip and setuptools that come with Python: pip would keep their versions where a package needs them."""
    run(environment, "-m", "pip", "uninstall", "--yes", "pip", "setuptools")


def resolve(environment: Path, *arguments: str) -> None:
    """Install what the arguments bring in, with the pip of this checkout's environment."""
    run(Path(sys.prefix), "-m", "pip", "--python", str(environment), "install", "--no-input", *arguments)


def closure(requirements: list[str], found: dict[str, Distribution]) -> set[str]:
    """What the requirements bring in, which must be the same everywhere."""
    by_target = {
        f"Python {python}, {machine[0]} {machine[2]}": closure_on(requirements, found, target(python, *machine))
        for python in PYTHONS
        for machine in MACHINES
    }
    everywhere = set.intersection(*by_target.values())
    for name, packages in by_target.items():
        if extra := packages - everywhere:
            raise InstallError(f"needed on {name} but not everywhere, so one lock is not enough: {sorted(extra)}")
        if missing := packages - set(found):
            raise InstallError(f"needed on {name} but not installed here: {sorted(missing)}")
    return everywhere


def closure_on(requirements: list[str], found: dict[str, Distribution], target: dict[str, str]) -> set[str]:
    reached: set[str] = set()
    done: set[str] = set()
    pending = [Requirement(text) for text in requirements]
    while pending:
        requirement = pending.pop()
        if str(requirement) in done:
            continue
        done.add(str(requirement))
        name = canonicalize_name(requirement.name)
        reached.add(name)
        for text in (found[name].requires or ()) if name in found else ():
            child = Requirement(text)
            extras = requirement.extras or {""}
            if child.marker is None or any(child.marker.evaluate({**target, "extra": extra}) for extra in extras):
                pending.append(child)
    return reached


def target(python: str, platform: str, system: str, machine: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": platform,
        "platform_system": system,
        "platform_machine": machine,
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def site_packages(environment: Path) -> Path:
    return next((environment / "lib").glob("python3.*/site-packages"))


def write(lock: Path, purpose: str, packages: dict[str, str]) -> None:
    lines = [f"# {purpose}. Written by `make lock`; do not edit, except for the version of torch."]
    lines += [f"{name}=={version}" for name, version in sorted(packages.items())]
    lock.write_text("\n".join(lines) + "\n")
    print(f"  {lock.name}: {len(packages)} packages")


if __name__ == "__main__":
    try:
        main()
    except InstallError as error:
        sys.exit(f"\nlocking failed: {error}")
