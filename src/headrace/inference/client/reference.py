"""What algorithms may ask of a model: how likely does another one, or the policy itself, find a sequence?

The contract alone, so that algorithms know nothing of servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.errors import Failure

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer


class ReferenceFailed(Failure):
    """A model gave no scores for a sequence. The message names the model and why."""


class Reference(Protocol):
    """A model that scores sequences of the policy's own token ids."""

    name: str
    """For people: who it is, and where."""

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> int | None:
        """Whether it can score up to `seq_len` of this tokenizer's ids at that temperature; raises `BadInput` if not.

        Gives its `max_model_len`, which scoring takes one token of, or None where that is not known.
        """
        ...

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        """The logprob of every token after those before it; 0.0 for the first. Raises `ReferenceFailed`."""
        ...

    async def close(self) -> None:
        """Close its connections; whoever serves it goes on."""
        ...
