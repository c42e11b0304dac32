"""`headrace completion`: the scripts in real shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.cli.main import COMMANDS, main

BASH = """
source {script}
COMP_WORDS=({words}) COMP_CWORD=$(({count} - 1))
_headrace
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compadd() {{ shift; [[ $1 == options ]] && print -l -- $options || print -l -- $choices }}
_describe() {{ print -l ${{commands%%:*}} }}
_files() {{ }}
compdef() {{ }}
source {script}
words=({words}) CURRENT={count} PREFIX={last}
_headrace
"""
FISH = """
source {script}
complete --do-complete '{line}'
"""


@pytest.mark.parametrize(
    ("shell", "template"), [("bash", BASH), ("zsh", ZSH), ("fish", FISH)], ids=["bash", "zsh", "fish"]
)
def test_a_shell_completes_commands_options_choices_and_keys(
    shell: str, template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    script = tmp_path / shell
    script.write_text(capsys.readouterr().out)

    def complete(line: str) -> set[str]:
        words = line.split(" ")
        last = words[-1] or "''"
        quoted = " ".join(word or "''" for word in words)
        program = template.format(script=script, words=quoted, count=len(words), line=line, last=last)
        done = subprocess.run([shell, "-c", program], capture_output=True, text=True, check=True)
        assert not done.stderr
        found = {line.partition("\t")[0].strip() for line in done.stdout.splitlines()}  # fish adds descriptions
        return {word for word in found if word.startswith(words[-1])} - {""}

    assert complete("headrace ") >= COMMANDS.keys()
    assert complete("headrace che") == {"check-algorithm"}
    assert complete("headrace rl run.toml --res") == {"--resume"}
    assert complete("headrace rl run.toml --trainer.optim.l") == {"--trainer.optim.lr"}
    assert complete("headrace sft run.toml --optim.l") == {"--optim.lr"}
    assert complete("headrace new env") == {"environment"}
    assert complete("headrace completion ") >= {"bash", "zsh", "fish"}
