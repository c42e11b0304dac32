"""`headrace new`: a skeleton of your own environment, with a test and run files."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

HELD_OUT = 'args = {{ split = "eval", num_tasks = {} }}'
SETTINGS: dict[str, dict[str, int | float | str]] = {
    "single": {
        "seq_len": 64,
        "max_tokens": 16,
        "max_steps": 40,
        "batch_size": 128,
        "sft_steps": 400,
        "mistakes": 0.5,
        "num_eval": 128,
        "eval_args": HELD_OUT.format(128),
    },
    "chat": {
        "seq_len": 160,
        "max_tokens": 8,
        "max_steps": 40,
        "batch_size": 128,
        "sft_steps": 400,
        "mistakes": 0.5,
        "num_eval": 60,
        "eval_args": "",
    },
    "tools": {
        "seq_len": 768,
        "max_tokens": 96,
        "max_steps": 30,
        "batch_size": 64,
        "sft_steps": 400,
        "mistakes": 0.3,
        "num_eval": 64,
        "eval_args": HELD_OUT.format(64),
    },
}
"""How the tiny model is trained on each kind of skeleton."""
FILES = {
    "{name}.py": "{kind}/environment.py.template",
    "test_{name}.py": "test.py.template",
    "{name}.toml": "rl.toml.template",
    "{name}_sft.toml": "sft.toml.template",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["environment"], help="what to write")
    parser.add_argument("name", metavar="NAME", help="what it is called, my-env for one")
    parser.add_argument("--dir", metavar="DIR", type=Path, default=Path(), help="where to write it [here]")
    parser.add_argument(
        "--kind",
        choices=list(SETTINGS),
        default="single",
        help="one question and one answer, a conversation, or one with tools [single]",
    )


def run(arguments: argparse.Namespace) -> int:
    from headrace.errors import BadInput

    name = module_name(arguments.name)
    if class_name(name, arguments.kind) in names_in_use(arguments.kind):
        raise BadInput(f"the skeleton uses the name {class_name(name, arguments.kind)!r} itself: choose another name")
    files = skeleton(name, arguments.kind)
    directory: Path = arguments.dir
    there = [str(directory / file) for file in files if (directory / file).exists()]
    if there:
        raise BadInput(f"{', '.join(there)} exists already: choose another name, or remove it")
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
    """The files of a new environment, by name."""
    from importlib import resources
    from string import Template

    templates = resources.files("headrace") / "templates"
    words = {"name": name, "class_name": class_name(name, kind), **SETTINGS[kind]}
    return {
        file.format(name=name): Template((templates / source.format(kind=kind)).read_text()).substitute(words).rstrip()
        + "\n"
        for file, source in FILES.items()
    }


def names_in_use(kind: str) -> set[str]:
    """What the module of a skeleton defines, imports, or has built in."""
    import ast
    import builtins

    module = "a_name_of_its_own"
    used = set(dir(builtins))
    for statement in ast.parse(skeleton(module, kind)[f"{module}.py"]).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            used |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            used.add(statement.name)
        elif isinstance(statement, ast.Assign):
            used |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return used


def module_name(given: str) -> str:
    """As Python wants it: `my-env` and `MyEnv` are `my_env`."""
    import importlib.util
    import keyword

    from headrace.errors import BadInput

    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]+", "_", given).lower()
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise BadInput(f"{given!r} cannot be the name of a module: use letters, digits and -, a letter first")
    if importlib.util.find_spec(name) is not None:
        raise BadInput(f"there is a module {name!r} already: choose another name")
    return name


def class_name(name: str, kind: str) -> str:
    """What the run file calls the environment: a function's name for `single`, a class's for the others."""
    return name if kind == "single" else "".join(word.capitalize() for word in name.split("_"))
