"""Scores per held-out example, as `headrace eval` leaves them: a folder per model, with `completions.jsonl`.

Which run a folder is about its `settings.json` says, by the model's directory. An episode that failed is wrong, as in
the evaluation itself; of two lines about one episode the later one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.errors import BadInput
from headrace.transport.run_dir import RunDir

Scores = dict[str, float]
"""By the key of an example: the share of its episodes that are right."""


class _Settings(msgspec.Struct):
    model: str


class _Episode(msgspec.Struct):
    key: str
    sample: int
    correct: bool = False
    error: str = ""


def read_scores(evaluation: Path, runs: Sequence[Path]) -> list[Scores]:
    """Those of each run's final model, in the order of the runs; nothing for one that was not evaluated."""
    if not evaluation.is_dir():
        raise BadInput(
            "no such directory",
            key="--evaluation",
            value=evaluation,
            fix="`headrace eval RUN... --output DIR` makes one.",
        )
    folders = {_model_of(file): file.parent for file in sorted(evaluation.rglob("settings.json"))}
    found = [folders.get((RunDir(run).final_model).resolve()) for run in runs]
    return [{} if folder is None else _read(folder / "completions.jsonl") for folder in found]


def _model_of(settings: Path) -> Path:
    try:
        return Path(msgspec.json.decode(settings.read_bytes(), type=_Settings).model)
    except msgspec.DecodeError as error:
        raise BadInput(f"not written by headrace eval: {error}", file=settings) from error


def _read(path: Path) -> Scores:
    episodes: dict[str, dict[int, bool]] = {}
    decoder = msgspec.json.Decoder(_Episode)
    content = path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            episode = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise BadInput(f"not an episode: {error}", file=path, line=number) from error
        if not episode.error:  # what failed says nothing about the model
            episodes.setdefault(episode.key, {})[episode.sample] = episode.correct
    return {key: sum(samples.values()) / len(samples) for key, samples in episodes.items()}
