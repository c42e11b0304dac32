"""The interface of a model that scores sequences: a teacher, or the policy itself.

Algorithms import this interface only, so they do not depend on servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.errors import Failure

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer


class ReferenceFailed(Failure):
    """A model could not score a sequence. The message names the model and the reason."""


class Reference(Protocol):
    """A model that scores sequences of the policy's token ids."""

    name: str
    """The model and its address, for messages."""

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> int | None:
        """Raise `BadInput` unless it can score up to `seq_len` of this tokenizer's ids at that temperature.

        Returns its `max_model_len`, of which scoring uses one token, or None if unknown.
        """
        ...

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        """Return the logprob of every token given those before it; 0.0 for the first. Raises `ReferenceFailed`."""
        ...

    async def close(self) -> None:
        """Close the connections; the model's server keeps running."""
        ...
