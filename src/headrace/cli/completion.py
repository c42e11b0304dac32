"""`headrace completion`: a script with which bash, zsh or fish complete commands, options and keys of run files.

The script is written from the parser of every command, and needs no Python while it completes.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.cli.main import COMMANDS, configured
from headrace.config.base import Config
from headrace.config.dpo import DpoConfig
from headrace.config.sft import SftConfig
from headrace.runfile.explain import keys
from headrace.runfile.run import RunConfig
from headrace.text import import_renderers

KINDS: Mapping[str, type[Config]] = {
    **dict.fromkeys(("rl", "demo", "prepare", "manifest", "sweep"), RunConfig),
    "sft": SftConfig,
    "dpo": DpoConfig,
}
"""By command, the run file whose keys are options."""


@dataclass(frozen=True)
class Words:
    """What can follow a command. Where `choices` is empty, files follow."""

    options: Mapping[str, str]
    """Help by option."""
    choices: list[str]


def words_of(command: str) -> Words:
    actions = configured(command)._actions
    options = {option: action.help or "" for action in actions for option in action.option_strings}
    if kind := KINDS.get(command):
        # A key in a list of tables needs the number of the table, which is not known here.
        options |= {f"--{key}": "" for key in keys(kind) if ".env." not in key}
    choices = [str(word) for action in actions if not action.option_strings for word in action.choices or ()]
    return Words(options, choices)


def configure_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(SHELLS), help="for which shell to write the script")
    parser.epilog = (
        'Use it at once: eval "$(headrace completion bash)". Permanently, write it where the shell finds it: '
        "~/.local/share/bash-completion/completions/headrace, a folder of zsh's $fpath as _headrace, or "
        "~/.config/fish/completions/headrace.fish."
    )


def run_completion(arguments: argparse.Namespace) -> int:
    import_renderers()  # before the commands import it with all of openai
    print("\n".join(SHELLS[arguments.shell]({name: words_of(name) for name in COMMANDS})))
    return 0


def bash(commands: Mapping[str, Words]) -> Iterator[str]:
    yield "_headrace() {"
    yield "  local current=${COMP_WORDS[COMP_CWORD]} options= choices="
    yield "  case $((COMP_CWORD > 1)):${COMP_WORDS[1]} in"
    yield f"    0:*) options='--help --version' choices='{' '.join(commands)}';;"
    for name, words in commands.items():
        yield f"    1:{name}) options='{' '.join(words.options)}' choices='{' '.join(words.choices)}';;"
    yield "  esac"
    yield "  [[ $current == -* ]] && choices=$options"
    yield '  COMPREPLY=($(compgen -W "$choices" -- "$current"))'
    yield "}"
    yield "complete -o bashdefault -o default -F _headrace headrace  # files where nothing matches"


def zsh(commands: Mapping[str, Words]) -> Iterator[str]:
    yield "#compdef headrace"
    yield "_headrace() {"
    yield "  local -a commands options choices"
    yield "  if (( CURRENT == 2 )); then"
    yield f"    commands=({' '.join(shlex.quote(f'{name}:{COMMANDS[name].help}') for name in commands)})"
    yield "    _describe command commands; return"
    yield "  fi"
    yield "  case $words[2] in"
    for name, words in commands.items():
        yield f"    {name}) options=({' '.join(words.options)}) choices=({' '.join(words.choices)});;"
    yield "  esac"
    yield "  if [[ $PREFIX == -* ]]; then compadd -a options"
    yield "  else (( $#choices )) && compadd -a choices; _files; fi"
    yield "}"
    yield 'if [[ $funcstack[1] == _headrace ]]; then _headrace "$@"; else compdef _headrace headrace; fi'


def fish(commands: Mapping[str, Words]) -> Iterator[str]:
    for name, words in commands.items():
        yield f"complete -c headrace -n __fish_use_subcommand -f -a {name} -d {_fish_quote(COMMANDS[name].help)}"
        start = f"complete -c headrace -n '__fish_seen_subcommand_from {name}'"
        for option, text in words.options.items():
            kind = "l" if option.startswith("--") else "s"
            yield f"{start} -{kind} {option.lstrip('-')} -d {_fish_quote(text)}"
        if words.choices:
            yield f"{start} -f -a '{' '.join(words.choices)}'"


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%") + "'"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
