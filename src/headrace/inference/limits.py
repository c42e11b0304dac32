"""What may be asked for, whichever engine computes it: how long a sequence may be, and what a request must hold."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import BadInput
from headrace.inference.backend import InvalidRequest
from headrace.inference.schema import SamplingParams

LONGEST_BY_DEFAULT = 4096


def longest_sequence(positions: int | None, configured: int | None) -> int:
    """Prompt plus completion: as configured, else what the model has `positions` for, at most 4096."""
    if configured is None:
        return min(positions or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
    if positions is not None and configured > positions:
        raise BadInput(
            f"the model's max_position_embeddings is {positions}",
            key="inference.max_model_len",
            value=configured,
            fix=f"Lower it to {positions} or less; where a run does not set it, it follows from seq_len.",
        )
    return configured


def check_request(token_ids: Sequence[int], params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Raise `InvalidRequest` for one that no engine can serve."""
    check_prompt(token_ids, vocab_size, max_model_len)
    if (problem := params.problem()) is not None:
        raise InvalidRequest(problem)


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int, field: str = "token_ids") -> None:
    """The same for what came as this field of a request."""
    if not token_ids:
        raise InvalidRequest(f"{field} is empty: a prompt needs at least one token")
    if len(token_ids) >= max_model_len:
        raise InvalidRequest(
            f"{field} has {len(token_ids)} tokens, which leaves no room for a new one: "
            f"prompt and completion together may have max_model_len = {max_model_len}"
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequest(f"{field} holds {bad}, which is outside the vocabulary of {vocab_size}")
