"""Rooms and who may enter them: what each part of the package may import."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "headrace"

LIGHT_PACKAGES = (
    "rollout",
    "orchestrator",
    "algorithms",
    "environments",
    "hackable",
    "evaluate",
    "transport",
    "text",
    "observe",
    "config",
    "launch",
    "sweep",
    "chat",
    "hub",
    "inference.client",
    "inference.server",
)
LIGHT_MODULES = ("cli.main", "inference.schema")
HEAVY = ("torch", "transformers")

WALK = """
import importlib, json, pkgutil, sys
packages, modules, heavy = json.loads(sys.argv[1])
names = [f"headrace.{name}" for name in modules]
for package in packages:
    root = importlib.import_module(f"headrace.{package}")
    names.append(root.__name__)
    names += [found.name for found in pkgutil.walk_packages(root.__path__, root.__name__ + ".")]
culprits = {}
for name in names:
    importlib.import_module(name)
    for module in heavy:
        if module in sys.modules and module not in culprits:
            culprits[module] = name
print(json.dumps([names, culprits]))
"""


def test_what_runs_beside_the_trainer_never_imports_torch_or_transformers():
    arguments = json.dumps([LIGHT_PACKAGES, LIGHT_MODULES, HEAVY])
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-c", WALK, arguments], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names, culprits = json.loads(done.stdout)
    assert len(names) > 20
    assert culprits == {}, f"heavy module: the first light module whose import loads it: {culprits}"


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, those for type checking included."""
    package = ["headrace", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


CONTRACT = "inference.client.reference"
"""What algorithms know of other models: an interface, which imports nothing of its room."""


def files_of(room: str) -> list[Path]:
    found = sorted((SOURCE / room).rglob("*.py"))
    assert found
    return found


def enters(module: str, room: str) -> bool:
    return module == f"headrace.{room}" or module.startswith(f"headrace.{room}.")


@pytest.mark.parametrize(
    ("room", "closed"),
    [
        ("trainer", ("orchestrator", "algorithms", "launch", "cli")),
        ("orchestrator", ("trainer", "launch", "cli")),
        ("algorithms", ("trainer", "orchestrator", "launch", "cli", "inference")),
        ("environments", ("trainer", "orchestrator", "launch", "cli")),
        ("transport", ("trainer", "orchestrator", "algorithms", "launch", "cli", "config")),
        ("inference", ("trainer", "orchestrator", "algorithms", "launch", "cli")),
        ("sweep", ("trainer", "cli")),
        ("config", ("trainer", "orchestrator", "algorithms", "launch", "cli", "inference", "environments")),
    ],
)
def test_imports_point_downward(room: str, closed: tuple[str, ...]):
    trespasses = {
        f"{path.relative_to(SOURCE)} imports {module}"
        for path in files_of(room)
        for module in imports_of(path)
        if any(enters(module, other) for other in closed) and not enters(module, CONTRACT)
    }
    assert trespasses == set()


@pytest.mark.parametrize(
    ("room", "closed"),
    [
        ("server", ("embedded", "vllm", "client")),
        ("embedded", ("server", "vllm", "client")),
        ("vllm", ("server", "embedded")),
        ("client", ("server", "embedded", "vllm", "weights")),
        ("weights", ("server", "embedded", "vllm", "client")),
    ],
)
def test_the_engines_and_the_server_know_each_other_by_their_contract_alone(room: str, closed: tuple[str, ...]):
    trespasses = {
        f"{path.relative_to(SOURCE)} imports {module}"
        for path in files_of(f"inference/{room}")
        for module in imports_of(path)
        if any(enters(module, f"inference.{other}") for other in closed) and path.name != "main.py"
    }
    assert trespasses == set()  # but for main.py, which starts an engine


def test_rollout_imports_only_the_standard_library_numpy_msgspec_and_safetensors():
    allowed = sys.stdlib_module_names | {"numpy", "msgspec", "safetensors"}
    foreign = {
        f"{path.name} imports {module}"
        for path in files_of("rollout")
        for module in imports_of(path)
        if module.split(".")[0] not in allowed and not (enters(module, "rollout") or enters(module, "errors"))
    }
    assert foreign == set()


def test_no_module_pickles():
    # spec: no pickle anywhere
    users = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for module in imports_of(path)
        if module.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "joblib")
    }
    assert users == set()
