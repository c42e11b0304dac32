"""Linear attention on packed rows: layers with a state that runs over their input get one sequence per batch row.

Such a layer computes a shared prefix once for each sequence, since the row has no place for its states. Padding is on
the right, where a causal layer does not see it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.trainer.packed_row import PaddedBlocks, RowLayout, VarlenSequences

_LAYER = "linear_attn"
"""The name that transformers gives these layers."""


def separate_sequences(model: Any) -> None:
    """Make the linear attention of a model read packed rows sequence by sequence; other inputs work as before."""
    for name, layer in model.named_modules():
        if name.endswith(f".{_LAYER}"):
            layer.forward = partial(_forward, layer.forward)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(plain: Any, hidden_states: Tensor, layout: RowLayout | None = None, **options: Any) -> Tensor:
    if layout is None:
        return plain(hidden_states=hidden_states, **options)  # type: ignore[no-any-return]
    tokens, sequences = hidden_states[0], layout.sequences
    if isinstance(sequences, PaddedBlocks):
        outputs = []
        for block in sequences.blocks:
            rows = torch.arange(len(block.keys), device=tokens.device)[:, None]
            outputs.append(plain(hidden_states=tokens[block.keys])[rows, block.query_positions])
        return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, sequences.outputs)[None]
    places, queries = _padded(sequences)
    return plain(hidden_states=tokens[places]).flatten(0, 1).index_select(0, queries)[None]  # type: ignore[no-any-return]


def _padded(runs: VarlenSequences) -> tuple[Tensor, Tensor]:
    """Return the row indices of each sequence's tokens, [sequences, longest], and the row's queries in them."""
    starts, ends = runs.key_starts[:-1, None].long(), runs.key_starts[1:, None].long()
    places = (starts + torch.arange(runs.longest_key, device=starts.device)).clamp(max=ends - 1)
    query = torch.arange(int(runs.query_starts[-1]), device=starts.device)
    sequence = torch.searchsorted(runs.query_starts[1:].long(), query, right=True)
    left = runs.query_starts[1:].long()[sequence] - query  # tokens up to the end of the sequence
    return runs.keys[places], sequence * runs.longest_key + (ends - starts)[sequence, 0] - left
