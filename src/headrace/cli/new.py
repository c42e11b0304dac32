"""`headrace new` and `headrace examples`: write the skeleton of an environment, list or copy the shipped run files."""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.util
import keyword
import re
import shutil
from importlib import resources
from pathlib import Path
from string import Template

import headrace
from headrace.cli.common import RUN_FILES, refuse_occupied
from headrace.errors import BadInput
from headrace.launch.own_code import defined_names

HELD_OUT = 'args = {{ split = "eval", num_tasks = {} }}'
SETTINGS: dict[str, dict[str, int | float | str]] = {
    kind: {
        "seq_len": seq_len,
        "max_tokens": max_tokens,
        "max_steps": max_steps,
        "batch_size": batch_size,
        "sft_steps": 400,
        "mistakes": mistakes,
        "num_eval": num_eval,
        "eval_args": "" if kind == "chat" else HELD_OUT.format(num_eval),
    }
    for kind, seq_len, max_tokens, max_steps, batch_size, mistakes, num_eval in (
        ("single", 64, 16, 40, 128, 0.5, 128),
        ("chat", 160, 8, 40, 128, 0.5, 60),
        ("tools", 768, 96, 30, 64, 0.3, 64),
    )
}
"""By kind of skeleton: the settings with which the tiny model is trained on it."""
FILES = {
    "{name}.py": "{kind}/environment.py.template",
    "test_{name}.py": "test.py.template",
    "{name}.toml": "rl.toml.template",
    "{name}_sft.toml": "sft.toml.template",
}

OTHER_NAME = "Choose another name."


def configure_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["environment"], help="what to write")
    parser.add_argument("name", metavar="NAME", help="its name, for example my-env")
    parser.add_argument("--dir", metavar="DIR", type=Path, default=Path(), help="where to write it [here]")
    parser.add_argument(
        "--kind",
        choices=list(SETTINGS),
        default="single",
        help="one question and one answer, a conversation, or one with tools [single]",
    )


def run_new(arguments: argparse.Namespace) -> int:
    name = module_name(arguments.name)
    module = skeleton("placeholder_module", arguments.kind)["placeholder_module.py"]
    if class_name(name, arguments.kind) in {*dir(builtins), *dict(defined_names(ast.parse(module)))}:
        raise BadInput("the skeleton uses this name itself", key="NAME", value=arguments.name, fix=OTHER_NAME)
    files = skeleton(name, arguments.kind)
    directory: Path = arguments.dir
    there = [str(directory / file) for file in files if (directory / file).exists()]
    if there:
        raise BadInput("exists already", file=", ".join(there), fix="Choose another name, or remove it.")
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (directory / file).write_text(text)
        print(f"wrote {directory / file}")
    here = directory.resolve() == Path.cwd()
    print("\nnext:" + ("" if here else f"\n  cd {directory}"))
    print(f"  pytest test_{name}.py\n  headrace probe {name}:{class_name(name, arguments.kind)}")
    print(f"  headrace rl {name}.toml")
    return 0


def skeleton(name: str, kind: str) -> dict[str, str]:
    """Return the files of a new environment by name."""
    templates = resources.files("headrace") / "templates"
    words = {"name": name, "class_name": class_name(name, kind), **SETTINGS[kind]}
    return {
        file.format(name=name): Template((templates / source.format(kind=kind)).read_text()).substitute(words).rstrip()
        + "\n"
        for file, source in FILES.items()
    }


def module_name(text: str) -> str:
    """Return a module name: `my_env` for `my-env` and `MyEnv`."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]+", "_", text).lower()
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        fact = "cannot be the name of a module"
        raise BadInput(fact, key="NAME", value=text, fix="Use letters, digits and -, a letter first.")
    if importlib.util.find_spec(name) is not None:
        raise BadInput(f"there is a module {name} already", key="NAME", value=text, fix=OTHER_NAME)
    return name


def class_name(name: str, kind: str) -> str:
    """Return the name of the environment in its module: a function for `single`, a class for the others."""
    return name if kind == "single" else "".join(word.capitalize() for word in name.split("_"))


DEMO = "reverse-text/rl.toml"


def examples_directory() -> Path:
    """Return `headrace/examples` of an installed wheel, or `examples` of the checkout that is imported."""
    package = Path(headrace.__file__).parent
    installed = package / "examples"
    return installed if installed.is_dir() else package.parents[1] / "examples"


def configure_examples(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--copy",
        metavar="DIR",
        nargs="?",
        type=Path,
        const=Path("examples"),
        help="copy all of them to DIR [./examples] instead of listing them",
    )


def run_examples(arguments: argparse.Namespace) -> int:
    source = examples_directory()
    if arguments.copy is not None:
        refuse_occupied(arguments.copy)
        shutil.copytree(source, arguments.copy, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        print(f"wrote {arguments.copy}; for example: headrace rl {arguments.copy / DEMO}")
        return 0
    files = sorted(path for path in source.rglob("*") if path.suffix in RUN_FILES)
    width = max(len(str(path.relative_to(source))) for path in files)
    for path in files:
        first_line = path.read_text().partition("\n")[0]
        print(f"{path.relative_to(source)!s:<{width}}  {first_line.removeprefix('# ')}")
    return 0
