"""What bounds the embedded engine on a GPU: its kernels, its matrix products, and whole steps.

    python -m benchmarks.inference.gpu_engine [kernels] [products] [steps] [projections] [long] [profile]

Shapes of Qwen2.5-0.5B, Qwen3-0.6B and Qwen3-4B with random weights; 0.6B where none is named. Kernels are timed as
graphs of ten calls, medians of twenty; the ceiling is what a large copy reaches. A variant that fails says so, and the
others go on.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.inference.traffic_jobs import GROUP, TRAFFIC
from benchmarks.models import qwen3_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.inference.embedded.block_manager import BLOCK_SIZE, blocks_for
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.projections import join_projections
from headrace.inference.schema import SamplingParams

DEVICE = torch.device("cuda")
VOCAB = 151_936
HEADS, KEY_HEADS, DIM, HIDDEN, INNER, LAYERS = 16, 8, 128, 1024, 3072, 28
SHAPES = {"0.5b": (14, 2, 64), "0.6b": (HEADS, KEY_HEADS, DIM), "4b": (32, 8, 128)}
"""Query heads, key heads and dimensions of attention."""
LAUNCHES = [(64, 4, 3), (64, 2, 3), (64, 4, 2), (64, 2, 2), (32, 4, 2), (32, 2, 2), (32, 2, 4)]
"""Keys of a tile, warps, stages."""
KERNEL_TRAFFIC = ("gsm8k", "reasoning", "tools")
PROGRAMS = (256, 512, 1024, 2048)
WARM_UP, MEASURED = 8, 40
"""Decode steps before those that are measured, and these."""


def say(*words: object) -> None:
    print(*words, flush=True)


def attempt(name: str, function: Callable[[], object]) -> None:
    try:
        say(f"{name:<44}", function())
    except Exception as error:
        traceback.print_exc()
        say(f"{name:<44} failed: {type(error).__name__}: {str(error)[:200]}")


def milliseconds(call: Callable[[], object], calls: int = 10, runs: int = 20) -> float:
    """Of one call, among several in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    found = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / calls)
    return statistics.median(found)


def copy_ceiling() -> float:
    """Bytes a second, read and written."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), calls=2, runs=5) * 1e3


class Running(NamedTuple):
    """A request that runs at one moment."""

    group: int
    """Requests of one group share their prompt."""
    prompt: int
    length: int


def running_requests(name: str, count: int) -> list[Running]:
    """Return what runs at one moment of steady traffic."""
    traffic, rng = TRAFFIC[name], random.Random(0)
    return [
        Running(each.number // GROUP, len(each.turns[0].tokens), len(each.rest(rng, VOCAB)[0].tokens))
        for each in traffic.under_way(traffic.conversations(VOCAB), count)
    ]


def kernels() -> None:
    ceiling = copy_ceiling()
    say(f"copy ceiling {ceiling / 1e12:.2f} TB/s")
    workloads = {f"{count} of {name}": running_requests(name, count) for name in KERNEL_TRAFFIC for count in (256, 32)}
    workloads |= {
        f"{count} x {length}": [Running(group, 0, length) for group in range(count)]
        for count, length in ((256, 540), (8, 32768))
    }
    for shape in SHAPES:
        for name, requests in workloads.items():
            attention(shape, name, requests, ceiling)
    for rows in (256, 1024):
        sampling(rows)


def block_tables(requests: list[Running]) -> tuple[Tensor, int]:
    """Return tables of blocks in any order, of which the full ones of a group's prompt are shared, and their number."""
    counts = [blocks_for(each.length) for each in requests]
    order: Iterator[int] = iter((torch.randperm(sum(counts)) + 1).tolist())
    tables = torch.zeros(len(requests), max(counts), dtype=torch.int32)
    prompts: dict[int, Tensor] = {}
    for table, request, count in zip(tables, requests, counts, strict=True):
        table[:count] = torch.tensor([next(order) for _ in range(count)])
        shared = request.prompt // BLOCK_SIZE
        table[:shared] = prompts.setdefault(request.group, table[:shared].clone())
    return tables.to(DEVICE), sum(counts) + 1


def attention(shape: str, name: str, requests: list[Running], ceiling: float) -> None:
    """The decode kernel with several launch parameters and numbers of programs beside one per request and head.

    Rates count the keys and values of each request, also those that are shared, which may be read once.
    """
    from headrace.inference.embedded.cuda.attention_kernels import Launch, PartialResults, decode_attention, store
    from headrace.inference.embedded.cuda.rows import EXTRA_PROGRAMS, split_into_items

    heads, key_heads, dim = SHAPES[shape]
    torch.manual_seed(0)
    lengths = np.array([request.length for request in requests])
    tables, blocks = block_tables(requests)
    slots = blocks * BLOCK_SIZE
    storage = torch.randn(2, slots, key_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    queries = torch.randn(len(lengths), heads, dim, device=DEVICE, dtype=torch.bfloat16)
    expected = _plain_attention(queries[0], storage, tables[0], int(lengths[0]))
    size = 2 * int(lengths.sum()) * key_heads * dim * 2

    def measured(launch: Launch, programs: int) -> str:
        limit = len(lengths) + max(1, programs // key_heads)
        items = split_into_items(lengths, limit)
        padded = np.full((limit, items.shape[1]), -1)
        padded[: len(items)] = items
        partial = PartialResults.allocate(limit, heads, dim, DEVICE)
        output = torch.full_like(queries, torch.nan)
        arrays = [torch.from_numpy(array).int().to(DEVICE) for array in (lengths, padded)]

        def call() -> None:
            decode_attention(queries, *storage, tables, *arrays, partial, output, scaling=dim**-0.5, launch=launch)

        taken = milliseconds(call)
        off = (output[0] - expected).abs().max().item()
        rate = size / taken * 1e3
        return f"{1e3 * taken:6.1f} us {rate / 1e12:5.2f} TB/s {rate / ceiling:5.0%}  {len(items)} items, off {off:.1e}"

    say(f"\nattention of {shape}, {name} tokens, {size / 1e9:.2f} GB")
    for values in LAUNCHES:
        launch = Launch(*values)
        attempt(
            f"  tile {launch.tile} warps {launch.warps} stages {launch.stages}",
            lambda launch=launch: measured(launch, EXTRA_PROGRAMS),
        )
    default = Launch.for_keys_of(dim * 2)
    for programs in PROGRAMS:
        attempt(f"  default, {programs} programs", lambda programs=programs: measured(default, programs))
    keys, values = torch.randn(2, len(lengths), key_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    places = torch.arange(len(lengths), device=DEVICE, dtype=torch.int32)
    attempt("  store", lambda: f"{1e3 * milliseconds(lambda: store(keys, values, *storage, places)):6.1f} us")


def _plain_attention(query: Tensor, storage: Tensor, table: Tensor, length: int) -> Tensor:
    """The attention of one request in float64."""
    slots = (table.long()[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=DEVICE)).flatten()[:length]
    key, value = storage[:, slots].double().repeat_interleave(len(query) // storage.shape[2], 2)
    weights = (torch.einsum("hd,thd->ht", query.double(), key) * query.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, value)


def sampling(rows: int) -> None:
    from headrace.inference.embedded.cuda.sampling_kernels import TileStats, sample_tokens
    from headrace.inference.embedded.sampling import sample

    logits = 3 * torch.randn(rows, VOCAB, device=DEVICE, dtype=torch.bfloat16)
    temperatures = torch.ones(rows, device=DEVICE)
    uniforms = torch.rand(rows, dtype=torch.float64, device=DEVICE)
    chosen = torch.zeros(2, rows, dtype=torch.float64, device=DEVICE)
    expected = sample(logits, [SamplingParams()] * rows, uniforms.tolist())

    def measured(tile: int, warps: int) -> str:
        tiles = TileStats.allocate(rows, VOCAB, DEVICE, tile)
        taken = milliseconds(
            lambda: sample_tokens(logits, temperatures, uniforms, chosen, tiles, tile=tile, warps=warps)
        )
        same = (chosen[0].long() == expected.tokens).float().mean().item()
        off = (chosen[1].float() - expected.logprobs)[chosen[0].long() == expected.tokens].abs().max().item()
        return f"{taken:7.3f} ms {logits.numel() * 2 / taken / 1e9:6.2f} TB/s  {same:.1%} as torch, off {off:.1e}"

    say(f"\nsampling, {rows} rows of {VOCAB}")
    for tile, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16)):
        attempt(f"  tile {tile} warps {warps}", lambda tile=tile, warps=warps: measured(tile, warps))


def products() -> None:
    """The matrix products of a step, as the model has them and with those that share an input as one."""
    shapes = {
        "q, k, v apart": [(HIDDEN, 2048), (HIDDEN, 1024), (HIDDEN, 1024)],
        "q, k, v as one": [(HIDDEN, 4096)],
        "o": [(2048, HIDDEN)],
        "gate, up apart": [(HIDDEN, INNER)] * 2,
        "gate, up as one": [(HIDDEN, 2 * INNER)],
        "down": [(INNER, HIDDEN)],
    }
    say()
    for rows in (256, 1024):
        for name, sizes in {**shapes, "head": [(HIDDEN, VOCAB)]}.items():
            inputs = [torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16) for k, _ in sizes]
            layers = 1 if name == "head" else LAYERS
            weights = [
                [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for k, n in sizes] for _ in range(layers)
            ]

            def call(inputs: list[Tensor] = inputs, weights: list[list[Tensor]] = weights) -> None:
                for own in weights:
                    for given, weight in zip(inputs, own, strict=True):
                        torch.nn.functional.linear(given, weight)

            attempt(f"  {rows} rows: {name}, all layers", lambda call=call: f"{milliseconds(call, calls=1):7.3f} ms")


def make_model(size: str = "0.6b", *, joined: bool = True) -> Any:
    """Random weights, made on the GPU."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(qwen3_config(size)).to(torch.bfloat16).eval()
    if joined:
        join_projections(model)
    return model


def filled(model: Any, requests: int, prompt: int, completion: int, **settings: Any) -> tuple[Engine, float, float]:
    """An engine whose requests all begin to decode, the seconds its making took, and prompt tokens a second."""
    start = time.perf_counter()
    blocks = requests * blocks_for(prompt + completion) * 66 // 64
    engine = Engine(model, max_model_len=prompt + completion, max_running=requests, kv_blocks=blocks, **settings)
    torch.cuda.synchronize()
    made = time.perf_counter() - start
    params = SamplingParams(max_tokens=completion, ignore_eos=True, logprobs=0)
    for seed in range(2):  # once to warm up
        generator = torch.Generator().manual_seed(seed)
        count = requests if seed else min(requests, 32)
        prompts = torch.randint(VOCAB, (count, prompt), generator=generator).tolist()
        submitted = [engine.submit(each, params) for each in prompts]
        start = time.perf_counter()
        while engine.scheduler.num_waiting or not all(request.has_sampled for request in submitted):
            engine.step()
        taken = time.perf_counter() - start
        if not seed:
            for request in submitted:
                engine.cancel(request)
            engine.step()
    return engine, made, requests * prompt / taken


def timed_steps(engine: Engine, count: int) -> tuple[float, float]:
    """Mean milliseconds of a decoding step, and of the device for it; a step is launched before the last is read."""
    engine.finish_step()
    engine.reset_counters()
    start = time.perf_counter()
    for _ in range(count):
        engine.step()
    engine.finish_step()
    return (time.perf_counter() - start) / count * 1e3, engine.device_busy_s / count * 1e3


def free(engine: Engine) -> None:
    """Engines share the model's layers: what the last one held must go."""
    for module in engine.model.modules():
        if hasattr(module, "paged_keys"):
            del module.paged_keys, module.paged_values
    engine.runner = None  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache()


def measured_steps(model: Any, requests: int, **settings: Any) -> str:
    engine, made, prompt_rate = filled(model, requests, 480, 128, **settings)
    timed_steps(engine, WARM_UP)
    whole, device = timed_steps(engine, MEASURED)
    free(engine)
    return (
        f"made {made:5.1f} s  prompts {prompt_rate:9,.0f} tok/s  step {whole:6.2f} ms  "
        f"device {device:6.2f}  beside {whole - device:5.2f}  {requests / whole * 1e3:9,.0f} tok/s"
    )


def steps() -> None:
    say("\ndecoding steps at about 540 tokens")
    model = make_model()
    for compile, graphs in ((True, True), (False, True), (True, False), (False, False)):
        attempt(
            f"  0.6B, 256 requests, compile {compile}, graphs {graphs}",
            lambda compile=compile, graphs=graphs: measured_steps(model, 256, compile=compile, graphs=graphs),
        )
    attempt("  0.6B, 1024 requests", lambda: measured_steps(model, 1024))
    attempt("  0.6B, 8 requests", lambda: measured_steps(model, 8))


def projections() -> None:
    """Steps whose projections of one input are separate products, and one."""
    say("\ndecoding steps at about 540 tokens, projections of one input apart and joined")
    for size in ("0.5b", "0.6b", "4b"):
        for joined in (False, True):
            attempt(
                f"  {size}, 256 requests, {'joined' if joined else 'apart'}",
                lambda size=size, joined=joined: measured_steps(make_model(size, joined=joined), 256),
            )


def whole_run(model: Any, requests: int) -> str:
    engine, _, _ = filled(model, requests, 256, 512)
    for request in engine.scheduler.running:  # the graphs of all sizes are there by now
        engine.cancel(request)
    engine.step()
    params = SamplingParams(max_tokens=512, ignore_eos=True, logprobs=0)
    prompts = torch.randint(VOCAB, (requests, 256), generator=torch.Generator().manual_seed(9)).tolist()
    start = time.perf_counter()
    submitted = [engine.submit(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    taken = time.perf_counter() - start
    assert all(len(request.logprobs) == 512 for request in submitted)
    free(engine)
    return f"{taken:6.2f} s  {requests * 512 / taken:9,.0f} tok/s"


def long() -> None:
    say("\n256 + 512 tokens with logprobs")
    model = make_model()
    for requests in (256, 1024):
        attempt(f"  0.6B, {requests} requests", lambda requests=requests: whole_run(model, requests))


def profile() -> None:
    for size in ("0.5b", "0.6b"):
        profile_step(size)


def profile_step(size: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    engine, _, _ = filled(make_model(size), 256, 480, 128)
    timed_steps(engine, WARM_UP)
    with profiling(activities=[ProfilerActivity.CUDA]) as found:
        engine.step()
        engine.finish_step()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    kernels = [row for row in rows if row.self_device_time_total > 0]
    total = sum(row.self_device_time_total for row in kernels)
    count = sum(row.count for row in kernels)
    say(f"\n{size}, a decoding step of 256 requests: {total / 1e3:.2f} ms in {count} kernels")
    for row in kernels[:25]:
        say(f"  {row.self_device_time_total / 1e3:8.3f} ms {row.count:5d} x  {row.key[:100]}")
    free(engine)


PARTS = {
    **{"kernels": kernels, "products": products, "steps": steps, "projections": projections},
    **{"long": long, "profile": profile},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; none: all")
    begun = time.perf_counter()
    for part in parser.parse_args().parts or PARTS:
        start = time.perf_counter()
        try:
            with torch.no_grad():
                PARTS[part]()
        except Exception:
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        say(f"[{part}: {time.perf_counter() - start:.0f} s, {time.perf_counter() - begun:.0f} s in all]")


if __name__ == "__main__":
    main()
