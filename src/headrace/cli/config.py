"""`headrace config`, `convert` and `manifest`: resolve, explain and translate run files."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config.base import Config
from headrace.config.dpo import DpoConfig
from headrace.config.files import dump
from headrace.config.sft import SftConfig
from headrace.errors import BadInput, shown_value
from headrace.launch.errors import notify
from headrace.launch.own_code import add_code_folders
from headrace.launch.saved_config import kind_of, merge_files
from headrace.runfile.explain import children, explain, find, kinds_of, summary_of, value_words, values_at
from headrace.runfile.hackable.plugins import explain_kwarg, kwargs_under
from headrace.runfile.hackable.sections import HackableConfig
from headrace.runfile.hackable.translation import OWN_SECTIONS
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig

WIDTH = 100
KINDS: tuple[type[Config], ...] = (RunConfig, SftConfig, DpoConfig)


def configure_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path, help="run files, merged left to right; or a run")
    parser.add_argument("--explain", metavar="KEY", help="type, default and purpose of a key, and its value in FILE")


def run_config(arguments: argparse.Namespace) -> int:
    files = [path / "config.toml" if path.is_dir() else path for path in arguments.files]
    key = arguments.explain
    add_code_folders(files)
    kind = kind_of(files) or RunConfig
    if key is None:
        if not files:
            raise BadInput("no file is given", key="FILE", fix="Name a run file, or a key: --explain KEY.")
        config, notices = load(kind, files)
        print("".join(f"# {notice}\n" for notice in notices) + dump(config), end="")
    elif _is_hackable_key(key) and not find(RunConfig, key):
        print(explanation(HackableConfig, key, merge_files(files) if files else None))
    elif files:
        print(explanation(kind, key, load(kind, files)[0].model_dump(mode="json", exclude_none=True)))
    else:
        print(explanation(next((kind for kind in KINDS if find(kind, key)), RunConfig), key))
    return 0


def _is_hackable_key(key: str) -> bool:
    """Return whether it is a key, valid or not, of a run file with data, rewards and an objective."""
    own = key.partition(".")[0] in OWN_SECTIONS and not any(find(kind, key) for kind in KINDS)
    in_table = key.startswith("trainer.optim.")  # only a run file has a table there
    return own or (bool(find(HackableConfig, key)) and not in_table)


def explanation(kind: type[Config], key: str, tree: dict[str, Any] | None = None) -> str:
    """Return the type, default and purpose of a key, its value in `tree`, and the keys below it."""
    lines = [key]
    inside = children(kind, key)
    kwarg = explain_kwarg(kind, key, tree)
    for entry in kwarg or explain(kind, key):
        lines.append(textwrap.fill(entry.sentence, WIDTH, initial_indent="  ", subsequent_indent="  "))
        facts = [("of type", ", ".join(entry.kinds)), ("type", entry.type), ("default", entry.default)]
        lines += [_fact(label, fact) for label, fact in facts if fact]
    if tree is not None:
        lines += [_fact("value", value) for value in _values(tree, key, is_section=bool(inside))]
    lines += _listed("types", list(kinds_of(kind, key).items()))
    lines += _listed("kwargs", [] if kwarg else kwargs_under(kind, key, tree))
    return "\n".join([*lines, *_listed("keys", [_child(kind, name, tree) for name in inside])])


def _child(kind: type[Config], key: str, tree: dict[str, Any] | None) -> tuple[str, str]:
    """Return the name and summary of a key with its value in `tree`, or its default."""
    if tree is not None:
        value = ", ".join(dict.fromkeys(value_words(value) for _, value in values_at(tree, key)))
    else:
        defaults = {entry.default for entry in explain(kind, key)}
        value = next(iter(defaults)) if len(defaults) == 1 else "by type"
    return key.rpartition(".")[2], f"{summary_of(kind, key)} [{value if len(value) <= 40 else '...'}]"


def _values(tree: dict[str, Any], key: str, *, is_section: bool) -> list[str]:
    values = values_at(tree, key)
    if is_section:
        return ["see its keys" if any(value is not None for _, value in values) else "unset"]
    if [path for path, _ in values] == [key]:
        return [value_words(values[0][1])]
    return [f"{value_words(value)} in {path}" for path, value in values] or ["unset"]


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
            textwrap.fill(text, WIDTH + 20, initial_indent=f"    {name:<{width}}  ", subsequent_indent=indent)
            for name, text in entries
        ),
    ]


def configure_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a TOML of prime-rl; JSON, YAML or a script of TRL")
    parser.add_argument("--output", metavar="F", type=Path, help="write the run file there [standard output]")
    parser.add_argument("--from", dest="system", choices=("prime-rl", "trl"), help="its system [recognized by keys]")
    parser.epilog = "A script is read, not executed. What could not be taken over is listed key by key."


def run_convert(arguments: argparse.Namespace) -> int:
    from headrace.tools.convert import convert

    output = arguments.output
    rewards = Path("rewards.py") if output is None else output.with_name(f"{output.stem}_rewards.py")
    made = convert(arguments.file, arguments.system, rewards.name)
    if output is None:
        print(made.text(), end="")
    else:
        for path in (output, *([rewards] if made.rewards else [])):
            if path.exists():
                raise BadInput("the file exists", key="--output", value=path, fix="Move it, or choose another name.")
        output.write_text(made.text(), encoding="utf-8")
        if made.rewards:
            rewards.write_text(made.rewards, encoding="utf-8")
        print(f"wrote {output}{f' and {rewards}' if made.rewards else ''}")
    notify(*made.notices, *(f"{theirs} is {ours} here" for theirs, ours in made.renamed))
    for key, value, reason in made.left_out:
        notify(f"not taken over: {key}{'' if value is None else f' = {shown_value(value)}'}: {reason}")
    notify(*(f"to be added: {problem}" for problem in made.missing))
    return 0


def configure_manifest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="run files, merged left to right")
    parser.add_argument("--output", metavar="F", type=Path, help="write the manifest to this file [standard output]")
    parser.epilog = "Any key can be set on top of the files: --launch.kubernetes.image repository:tag"


def run_manifest(arguments: argparse.Namespace) -> int:
    from headrace.launch.manifest import manifest  # brings the HTTP client of nodes

    add_code_folders(arguments.files)
    overrides = [*arguments.overrides, "--launch.on", "nodes"]
    config, notices = load(kind_of(arguments.files) or RunConfig, arguments.files, overrides)
    notify(*notices)
    text = manifest(config)
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text)
    return 0
