"""What each package may import."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "headrace"

LIGHT_PACKAGES = (
    "rollout",
    "orchestrator",
    "algorithms",
    "environments",
    "tools",
    "transport",
    "text",
    "observe",
    "config",
    "runfile",
    "launch",
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


@pytest.mark.parametrize(
    ("packages", "modules", "heavy"),
    [
        pytest.param(LIGHT_PACKAGES, LIGHT_MODULES, HEAVY, id="what runs beside the trainer"),
        pytest.param(("inference.server",), ("cli.serve",), ("pyarrow", "headrace.observe.terminal"), id="a server"),
        pytest.param((), ("cli.doctor",), ("numpy", "asyncio", "sqlite3", "urllib.request"), id="the doctor"),
    ],
)
def test_a_process_does_not_import_heavy_modules_that_it_does_not_use(
    packages: tuple[str, ...], modules: tuple[str, ...], heavy: tuple[str, ...]
):
    arguments = json.dumps([packages, modules, heavy])
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-c", WALK, arguments], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names, culprits = json.loads(done.stdout)
    assert len(names) > 10 or not packages
    assert culprits == {}, f"heavy module: the first light module whose import loads it: {culprits}"


@cache
def imports_of(path: Path) -> list[str]:
    """Return every module that a file imports, anywhere in it, those for type checking included."""
    return list(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    package = ["headrace", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def files_of(package: str) -> list[Path]:
    files = sorted((SOURCE / package).rglob("*.py"))
    assert files
    return files


def enters(module: str, package: str) -> bool:
    return module == f"headrace.{package}" or module.startswith(f"headrace.{package}.")


LAYERS = (
    ("cli",),
    ("api",),
    ("tools",),
    ("launch",),
    ("runfile",),
    ("orchestrator", "trainer"),
    ("algorithms",),
    ("environments",),
    ("inference",),
    ("observe",),
    ("config", "text", "transport"),
    ("rollout",),
    ("imports", "machine"),
    ("errors",),
    ("safe_text",),
)
"""The packages and top-level modules from the top to the bottom. Each may import what stands below its own row."""
TOOLS = (
    ("sweep", "view", "replay"),
    ("compare", "audit", "probe"),
    ("evaluate", "rescore", "check_algorithm", "hub", "chat", "pairs", "models", "convert"),
    ("common",),
)
"""The same for the folders of `tools`."""


def names_in(folder: Path) -> set[str]:
    """Return the packages and modules in a folder."""
    return {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}


def upward_imports(folder: Path, prefix: str, layers: tuple[tuple[str, ...], ...]) -> list[str]:
    """Return `file imports module` for each import between rows of `layers` that does not point downward."""
    row = {name: number for number, names in enumerate(layers) for name in names}
    upward = []
    for path in sorted(folder.rglob("*.py")):
        own = path.relative_to(folder).with_suffix("").parts[0]
        for module in imports_of(path) if own in row else ():
            other = module.removeprefix(prefix).split(".")[0] if module.startswith(prefix) else own
            if other in row and other != own and row[other] <= row[own]:
                upward.append(f"{path.relative_to(SOURCE)} imports {module}")
    return upward


def test_every_package_has_a_place_in_the_layers():
    assert {name for row in LAYERS for name in row} == names_in(SOURCE) - {"__init__", "__main__"}
    assert {name for row in TOOLS for name in row} == names_in(SOURCE / "tools") - {"__init__"}


def test_imports_point_downward():
    # Every package, imports inside functions and those for type checking included: so there are no circles either.
    assert upward_imports(SOURCE, "headrace.", LAYERS) == []
    assert upward_imports(SOURCE / "tools", "headrace.tools.", TOOLS) == []


def test_an_upward_import_and_one_beside_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    for name, text in {
        "low": "def late():\n    from headrace.high import thing\n",
        "high": "import headrace.low\nimport headrace.beside\n",
        "beside": "",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text(text)
    assert set(upward_imports(tmp_path, "headrace.", (("high", "beside"), ("low",)))) == {
        "low/module.py imports headrace.high",
        "low/module.py imports headrace.high.thing",
        "high/module.py imports headrace.beside",
    }


@pytest.mark.parametrize(
    ("package", "closed"),
    [
        ("server", ("embedded", "vllm", "client")),
        ("embedded", ("server", "vllm", "client")),
        ("vllm", ("server", "embedded")),
        ("client", ("server", "embedded", "vllm", "weights")),
        ("weights", ("server", "embedded", "vllm", "client")),
    ],
)
def test_the_engines_and_the_server_know_each_other_by_their_contract_alone(package: str, closed: tuple[str, ...]):
    forbidden = {
        f"{path.relative_to(SOURCE)} imports {module}"
        for path in files_of(f"inference/{package}")
        for module in imports_of(path)
        if any(enters(module, f"inference.{other}") for other in closed) and path.name != "main.py"
    }
    assert forbidden == set()  # but for main.py, which starts an engine


def test_rollout_imports_only_the_standard_library_numpy_msgspec_safetensors_and_xxhash():
    allowed = sys.stdlib_module_names | {"numpy", "msgspec", "safetensors", "xxhash"}
    own = ("rollout", "errors", "safe_text")
    foreign = {
        f"{path.name} imports {module}"
        for path in files_of("rollout")
        for module in imports_of(path)
        if module.split(".")[0] not in allowed and not any(enters(module, name) for name in own)
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


def test_text_of_others_is_shown_by_what_escapes_it_alone():
    # docs/explanation/architecture.md, "Text of others": other consoles and functions would show it raw
    raw = set()
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        if re.search(r"\bConsole\(", path.read_text()):
            raw.add(f"{name} makes a console of rich")
        if {"html.escape", "rich.markup.escape", "xml.sax.saxutils.escape"} & set(imports_of(path)):
            raw.add(f"{name} escapes markup itself")
    assert raw == {"safe_text.py escapes markup itself"}
