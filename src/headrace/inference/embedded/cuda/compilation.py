"""Compiled decoder layers, and CUDA graphs of whole steps.

All layers share one compiled program for any number of tokens above one, and a second one where layers differ. Outside
of `compiled` blocks the model runs uncompiled, with its hooks.

Graphs are captured for a few numbers of tokens before the first request. A graph reads its inputs from fixed tensors,
and all graphs share one memory pool: the output of one is valid until another runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.nn import Module

K = TypeVar("K")
T = TypeVar("T")

MAX_PROGRAMS = 64
"""Compiled programs per kind of layer, beyond which the compiler would run new ones uncompiled."""
MAX_MIXED_PREFILL = 2048
"""Prefill tokens that a graph computes beside all decode tokens; more keep the GPU busy without a graph."""


class CompiledLayers:
    """Gives each layer of a model a compiled `forward` besides its own."""

    def __init__(self, model: Any) -> None:
        self._is_on = False
        for module in model_layers(model):
            plain = getattr(module.forward, "plain", module.forward)  # of a model that had an engine before
            module.forward = self._switchable(plain, torch.compile(plain, dynamic=True))

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Run layers compiled in the block."""
        settings = torch._dynamo.config  # thread-local from torch 2.12 on
        if settings.recompile_limit < MAX_PROGRAMS:
            settings.recompile_limit = MAX_PROGRAMS
            settings.specialize_float = True  # symbolic floats become constants, but after a second tracing
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _switchable(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return (compiled if self._is_on else plain)(*args, **kwargs)

        vars(forward)["plain"] = plain
        return forward


def model_layers(model: Any) -> list[Module]:
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def layers_in_use(model: Any, compute: Callable[[], Any]) -> list[Module]:
    """Return the layers that `compute` uses, in this order; none if some are used twice or within others."""
    begun: list[Module] = []
    ended: list[Module] = []
    is_sequence = True

    def begin(layer: Module, _: Any) -> None:
        nonlocal is_sequence
        is_sequence &= layer not in begun and len(begun) == len(ended)
        begun.append(layer)

    layers = model_layers(model)
    hooks = [layer.register_forward_pre_hook(begin) for layer in layers]
    hooks += [layer.register_forward_hook(lambda layer, *_: ended.append(layer)) for layer in layers]
    try:
        compute()
    finally:
        for hook in hooks:
            hook.remove()
    return begun if is_sequence else []


def batch_sizes(largest: int) -> list[int]:
    """Return 2, 4, 8, ... and from 32 on also the middle between two; the last is at least `largest`."""
    sizes = [2]
    while sizes[-1] < largest:
        last = sizes[-1]
        power = 1 << (last.bit_length() - 1)
        sizes.append(last + power // 2 if last >= 32 and last == power else 2 * power)
    return sizes


def mixed_sizes(rows: int) -> list[int]:
    """Return the numbers of tokens of steps with prefill, for up to `rows` requests."""
    sizes = [32]
    while sizes[-1] < rows + MAX_MIXED_PREFILL:
        sizes.append(sizes[-1] + max(16, min(sizes[-1] // 4, 256) // 16 * 16))
    return sizes


class StepGraphs(Generic[K, T]):
    """CUDA graphs of `compute(shape)`; its result is overwritten by the next run of any shape.

    If `compute` calls `split`, a shape has two graphs, and `between` is called between them.
    """

    def __init__(self, compute: Callable[[K], T], between: Callable[[], None] = lambda: None) -> None:
        self._compute = compute
        self._between = between
        self._captured: dict[K, tuple[list[torch.cuda.CUDAGraph], T]] = {}
        self._capturing: list[torch.cuda.CUDAGraph] = []
        """The graphs so far of the shape that is being captured."""
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, shapes: Iterable[K], prepare: Callable[[K], None] = lambda shape: None) -> None:
        """Capture these shapes, the largest first: small graphs reuse the memory of large ones.

        Each is also computed once, after `prepare` has set its inputs.
        """
        shapes = list(shapes)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with gc_disabled(), torch.cuda.stream(stream):
            for shape in shapes:
                prepare(shape)
                self._compute(shape)  # initializes libraries and compiles kernels
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            for shape in shapes:
                self._begin_graph()
                try:
                    result = self._compute(shape)
                finally:
                    self._capturing[-1].capture_end()
                    graphs, self._capturing = self._capturing, []
                self._captured[shape] = graphs, result
        torch.cuda.current_stream().wait_stream(stream)

    def split(self) -> None:
        """End the graph that is being captured, if there is one, and begin the next."""
        if self._capturing:
            self._capturing[-1].capture_end()
            self._begin_graph()

    def _begin_graph(self) -> None:
        # Not `torch.cuda.graph`, which synchronizes and empties the allocator's cache before each capture.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")  # other threads may allocate
        self._capturing.append(graph)

    @property
    def are_halved(self) -> bool:
        return all(len(graphs) == 2 for graphs, _ in self._captured.values())

    def result(self, shape: K) -> T:
        """Return what the last run of this shape wrote."""
        return self._captured[shape][1]

    def run(self, shape: K) -> T:
        graphs, result = self._captured[shape]
        for number, graph in enumerate(graphs):
            if number:
                self._between()
            graph.replay()
        return result


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Collect garbage, then disable collections in the block: freeing may synchronize, which breaks a capture."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
