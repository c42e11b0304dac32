"""Decoder layers compiled one by one: they are the same program, so that the compiler works once for all of them.

Lengths are symbolic, and what else a row is like is seen by attention's operator alone (`run_attention.py`). A layer's
hooks, such as those that gather sharded parameters, stay outside. Left out on purpose: the model as a whole, which
takes minutes and gains little, and attention in blocks, which interrupts the program: a layer that is checkpointed as
well then runs as if it were not compiled.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

MOST_PROGRAMS = 64
"""Of all layers together: some for each kind of attention and each way to compute again, with and without gradients."""


def compile_layers(layers: Iterable[torch.nn.Module], backend: str = "inductor", *, sharded: bool = False) -> None:
    """Compile each layer at its first call.

    Of sharded parameters the sizes would be symbolic, too: there a second row of another length makes lengths symbolic,
    for good, by a second program.
    """
    # Past the compiler's own limit, 8 for all layers together, it runs what is new uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_PROGRAMS)
    _fuse_norms_of_all_lengths()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=None if sharded else True)


def _fuse_norms_of_all_lengths() -> None:
    """Else short and long rows are two programs: the compiler fuses the gradients of a norm where that gains most."""
    from torch._inductor import config  # which takes a second, and is for those alone who compile

    if hasattr(config.triton, "mix_order_reduction_non_strict_mode"):  # not in every version of torch
        config.triton.mix_order_reduction_non_strict_mode = True
