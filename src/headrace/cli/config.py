"""`headrace config`: what a run file resolves to, and what any key of it means."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config.base import Config
    from headrace.config.sft import SftConfig
    from headrace.runfile.run import RunConfig

WIDTH = 100


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path, help="run files, merged left to right; or a run")
    parser.add_argument("--explain", metavar="KEY", help="type, default and purpose of a key, and its value in FILE")


def run(arguments: argparse.Namespace) -> int:
    from headrace.config.files import dump
    from headrace.config.sft import SftConfig
    from headrace.errors import BadInput
    from headrace.launch.own_code import add_code_folders
    from headrace.runfile.hackable.sections import HackableConfig
    from headrace.runfile.reading import load
    from headrace.runfile.run import RunConfig

    files = [path / "config.toml" if path.is_dir() else path for path in arguments.files]
    written = merged(files)
    kind = kind_of(files) or RunConfig
    if arguments.explain is None:
        if not files:
            raise BadInput("which run file? headrace config FILE, or headrace config --explain KEY")
        add_code_folders(files)
        config, notices = load(kind, files)
        print("".join(f"# {notice}\n" for notice in notices) + dump(config), end="")
        return 0
    tree: dict[str, Any] | None = None
    if is_of_hackable(arguments.explain) and not is_key(RunConfig, arguments.explain):
        add_code_folders(files)
        print(explanation(HackableConfig, arguments.explain, written if files else None))
        return 0
    if files:
        add_code_folders(files)
        tree = load(kind, files)[0].model_dump(mode="json", exclude_none=True)
    elif not is_key(RunConfig, arguments.explain) and is_key(SftConfig, arguments.explain):
        kind = SftConfig
    print(explanation(kind, arguments.explain, tree))
    return 0


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """What the files say, as they say it."""
    from headrace.config.files import read_file
    from headrace.runfile.reading import merge

    tree: dict[str, Any] = {}
    for file in files:
        merge(tree, read_file(file))
    return tree


def kind_of(files: Sequence[Path]) -> type[RunConfig] | type[SftConfig] | None:
    """Return the type of the run, or None if the files could be of either.

    Supervised training has examples, and neither an orchestrator nor a data provider.
    """
    from headrace.config.sft import SftConfig
    from headrace.runfile.hackable.translation import is_hackable
    from headrace.runfile.run import RunConfig

    tree = merged(files)
    if "orchestrator" in tree or is_hackable(tree):
        return RunConfig
    return SftConfig if "data" in tree else None


def is_key(kind: type[Config], key: str) -> bool:
    from headrace.runfile.explain import find

    return bool(find(kind, key))


def is_of_hackable(key: str) -> bool:
    """Whether it is a key, right or wrong, of the file with data, rewards and an objective."""
    from headrace.config.sft import SftConfig
    from headrace.runfile.hackable.sections import HackableConfig
    from headrace.runfile.hackable.translation import OWN_SECTIONS

    own = key.partition(".")[0] in OWN_SECTIONS and not is_key(SftConfig, key)
    in_table = key.startswith("trainer.optim.")  # a table there is that of a run file
    return own or (is_key(HackableConfig, key) and not in_table)


def explanation(kind: type[Config], key: str, tree: dict[str, Any] | None = None) -> str:
    """All there is to say about a key, and its value in `tree`."""
    from headrace.runfile.explain import children, explain, kinds_of
    from headrace.runfile.hackable.explain import explain_kwarg, kwargs_under

    lines = [key]
    inside = children(kind, key)
    kwarg = explain_kwarg(kind, key, tree)
    for entry in kwarg or explain(kind, key):
        lines.append(textwrap.fill(entry.sentence, WIDTH, initial_indent="  ", subsequent_indent="  "))
        facts = [("of type", ", ".join(entry.kinds)), ("type", entry.type), ("default", entry.default)]
        lines += [_fact(label, fact) for label, fact in facts if fact]
    if tree is not None:
        lines += _values(tree, key, is_section=bool(inside))
    lines += _listed("types", list(kinds_of(kind, key).items()))
    lines += _listed("kwargs", [] if kwarg else kwargs_under(kind, key, tree))
    return "\n".join([*lines, *_listed("keys", [_child(kind, name, tree) for name in inside])])


def _child(kind: type[Config], key: str, tree: dict[str, Any] | None) -> tuple[str, str]:
    from headrace.runfile.explain import explain, summary_of, values_at

    entries = explain(kind, key)
    defaults = {entry.default for entry in entries}
    told = next(iter(defaults)) if len(defaults) == 1 else "by type"
    if tree is not None:
        told = ", ".join(dict.fromkeys(_shown(value) for _, value in values_at(tree, key)))
    short = told if len(told) <= 40 else "..."
    return key.rpartition(".")[2], f"{summary_of(kind, key)} [{short}]"


def _values(tree: dict[str, Any], key: str, *, is_section: bool) -> list[str]:
    from headrace.runfile.explain import values_at

    found = values_at(tree, key)
    if is_section:
        return [_fact("value", "see its keys" if any(value is not None for _, value in found) else "unset")]
    if [path for path, _ in found] == [key]:
        return [_fact("value", _shown(found[0][1]))]
    return [_fact("value", f"{_shown(value)} in {path}") for path, value in found] or [_fact("value", "unset")]


def _shown(value: Any) -> str:
    from headrace.runfile.explain import value_words

    return value_words(value)


def _fact(label: str, fact: str) -> str:
    return textwrap.fill(fact, WIDTH, initial_indent=f"  {label:<8} ", subsequent_indent=" " * 11)


def _listed(title: str, entries: Sequence[tuple[str, str]]) -> list[str]:
    if not entries:
        return []
    width = max(len(name) for name, _ in entries)
    indent = " " * (width + 6)
    return [
        f"  {title}:",
        *(
            textwrap.fill(told, WIDTH + 20, initial_indent=f"    {name:<{width}}  ", subsequent_indent=indent)
            for name, told in entries
        ),
    ]
