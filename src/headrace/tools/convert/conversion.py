"""Translate a file, then leave out, one by one, the keys that the run file does not have, and say why."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import tomli_w
import yaml  # type: ignore[import-untyped]

from headrace.config.base import Origins, Tree
from headrace.config.files import read_file
from headrace.errors import BadInput
from headrace.runfile.foreign_keys import replace_foreign_keys
from headrace.runfile.reading import validate, value_at
from headrace.runfile.run import RunConfig
from headrace.tools.convert import prime_rl, trl

SYSTEMS = ("prime-rl", "trl")


class LeftOut(NamedTuple):
    key: str
    value: Any
    reason: str


@dataclass
class Conversion:
    """A run file of Headrace, and what became of the keys of the other one."""

    system: str
    tree: Tree
    rewards: str = ""
    """The source of a module with reward functions, which belongs beside the run file."""
    renamed: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    missing: list[BadInput] = field(default_factory=list)
    """What must be added before the run can start."""

    @property
    def suffix(self) -> str:
        return ".toml" if self.system == "prime-rl" else ".yaml"

    def text(self) -> str:
        if self.system == "prime-rl":
            return tomli_w.dumps(self.tree)
        text: str = yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)
        return text


def convert(file: Path, system: str | None = None, rewards_file: str = "rewards.py") -> Conversion:
    """Translate a prime-rl TOML file, or TRL's settings in a JSON or YAML file or in a script.

    The reward functions of a script are to be written to `rewards_file`.
    """
    if file.suffix == ".py":
        script = trl.read_script(file.read_text(encoding="utf-8"))
        if not script.settings.get("reward_funcs") and len(script.settings) == 1:
            raise BadInput("no GRPOConfig with literal settings is in it", file=file)
        made = Conversion("trl", trl.translate(script.settings, rewards_file), script.rewards)
        made.left_out = [LeftOut(name, None, "It is not a literal in the script.") for name in script.unread]
    else:
        content = read_file(file)
        found = system or _recognize(content, file)
        if found == "trl":
            made = Conversion(found, trl.translate(content, ""))
        else:
            made = Conversion(found, content, notices=replace_foreign_keys(content))
            made.renamed, left = prime_rl.translate(content)
            made.left_out = [LeftOut(*each) for each in left]
    with TemporaryDirectory() as folder:  # where the reward functions can be imported from
        Path(folder, rewards_file).write_text(made.rewards, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            _leave_out_unknown(made, file)
        finally:
            sys.path.remove(folder)
    return made


def _recognize(content: Tree, file: Path) -> str:
    if content.keys() & trl.FIELDS:
        return "trl"
    if content.keys() & {"orchestrator", "trainer", "inference"}:
        return "prime-rl"
    fix = f"Name its system: --from {' or '.join(SYSTEMS)}."
    raise BadInput("neither a run file of prime-rl nor settings of TRL", file=file, fix=fix)


def _leave_out_unknown(made: Conversion, file: Path) -> None:
    """Validate until what remains is valid, or lacks something that only the user knows."""
    while problems := _problems(made.tree, file):
        present = [problem for problem in problems if _value(made.tree, problem.key) is not None]
        made.missing = [problem for problem in problems if problem not in present]
        if not present:
            return
        for problem in present:
            assert problem.key is not None
            *parents, name = problem.key.split(".")
            value = value_at(made.tree, parents).pop(name, None)
            hint = trl.HINTS.get(problem.key.rpartition(".")[2]) if made.system == "trl" else None
            reason = hint or " ".join(filter(None, [f"{problem.fact.rstrip('.')}.", problem.fix]))
            made.left_out.append(LeftOut(problem.key, value, reason))


def _value(tree: Tree, key: str | None) -> Any:
    return None if key is None else value_at(tree, key.split("."))


def _problems(tree: Tree, file: Path) -> Sequence[BadInput]:
    origins = Origins(str(file))
    try:
        translated, _ = RunConfig.translated(copy.deepcopy(tree), [file], origins)
        validate(RunConfig, translated, origins)
    except BadInput as error:
        return error.problems
    return ()
