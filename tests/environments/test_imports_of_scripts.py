"""Examples and benchmarks import what the environments package has."""

import ast
import importlib
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def missing_imports(script: Path) -> list[str]:
    """The names that a script imports from this package and that do not exist."""
    missing = []
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("headrace.environments"):
            continue
        assert node.module is not None
        if importlib.util.find_spec(node.module) is None:
            missing.append(node.module)
            continue
        module = importlib.import_module(node.module)
        names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
        missing += [
            f"{node.module}.{name}" for name in names if importlib.util.find_spec(f"{node.module}.{name}") is None
        ]
    return missing


def test_every_name_that_an_example_or_a_benchmark_imports_exists():
    scripts = [script for folder in ("examples", "benchmarks") for script in sorted((ROOT / folder).rglob("*.py"))]
    assert len(scripts) > 20
    assert {str(script): missing for script in scripts if (missing := missing_imports(script))} == {}
