"""Words and names that environments draw from, kept as text files in `words/`.

`answers` are common words, chosen by hand; `guesses` are the other small-letter words of an English word list, with
common inflected forms and without slurs.
"""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def word_list(name: str) -> tuple[str, ...]:
    """The words of one file, in its order."""
    file = resources.files("headrace.environments.shipped").joinpath("words", f"{name}.txt")
    return tuple(file.read_text(encoding="utf-8").split())
