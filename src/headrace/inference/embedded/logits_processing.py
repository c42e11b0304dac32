"""What changes logits before sampling: penalties of earlier tokens, with vLLM's semantics, and masks of grammars.

Truncation, sampling and logprobs then see the changed logits. Requests without either cost nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.inference.embedded.grammar import Masks

if TYPE_CHECKING:
    from headrace.inference.embedded.request import Request

BIAS = np.float32(0), np.float32(-np.inf)
"""What is added to the logits of tokens that are allowed, and of others."""


class TokenCounts:
    """The distinct tokens of a prompt and its completion, with how often each was sampled."""

    def __init__(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._table = np.zeros((2, len(self._places) + max_new_tokens))
        self._table[0, : len(self._places)] = list(self._places)

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        self._table[0, place] = token
        self._table[1, place] += 1

    @property
    def table(self) -> np.ndarray:
        """[2, token] float64: ids and counts."""
        return self._table[:, : len(self._places)]


def process_logits(logits: Tensor, requests: Sequence[Request], masks: Masks | None) -> Tensor:
    """Return the logits that the requests, one per row, are sampled from; those given may be changed in place."""
    rows = {request: row for row, request in enumerate(requests) if request.processes_logits}
    if not rows:
        return logits
    logits = logits.float()
    if penalized := [(row, request) for request, row in rows.items() if request.counts is not None]:
        penalize(logits, penalized)
    if masks is not None:
        masks.done.result()
        own = [place for place, request in enumerate(masks.requests) if request in rows]
        mask_tokens(logits, [rows[masks.requests[place]] for place in own], masks.bits[own])
    return logits


def penalize(logits: Tensor, requests: Sequence[tuple[int, Request]]) -> None:
    """Penalize the tokens of requests in their rows, in place."""
    tables = [request.counts.table for _, request in requests if request.counts is not None]
    settings = [
        (row, each.params.repetition_penalty, each.params.frequency_penalty, each.params.presence_penalty)
        for row, each in requests
    ]
    repeated = np.repeat(np.array(settings), [table.shape[1] for table in tables], axis=0)
    sent = torch.from_numpy(np.vstack([repeated.T, np.hstack(tables)])).to(logits.device)
    rows, tokens = sent[0].long(), sent[4].long()
    repetition, frequency, presence, counts = sent[[1, 2, 3, 5]].float()
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, tokens] = values - frequency * counts - presence * (counts > 0)


def mask_tokens(logits: Tensor, rows: Sequence[int], bits: np.ndarray) -> None:
    """Set the logits of tokens whose bit is 0 to minus infinity, in place."""
    packed, vocab = bits.view(np.uint8), logits.shape[1]
    if logits.device.type == "cpu":
        allowed = np.unpackbits(packed, axis=1, count=vocab, bitorder="little")
        bias = torch.from_numpy(np.where(allowed, *BIAS))
    else:  # the bits are sent, an eighth of the bytes of a mask
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        unpacked = (torch.from_numpy(packed).to(logits.device)[:, :, None] >> places) & 1
        bias = unpacked.view(len(rows), -1)[:, :vocab].float().log()  # of 1 and of 0
    logits.index_add_(0, torch.from_numpy(np.array(rows)).to(logits.device), bias)
