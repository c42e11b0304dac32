"""The kernels of the engine on GPUs against plain torch: on a GPU, or on a CPU where Triton interprets them."""

import math
import os
import random

import numpy as np
import pytest
import torch

from headrace.inference.embedded.block_manager import BLOCK_SIZE
from headrace.inference.embedded.cuda.rows import split_into_items
from headrace.inference.embedded.sampling import sample
from headrace.inference.schema import SamplingParams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("Triton has neither a GPU nor its interpreter", allow_module_level=True)

from headrace.inference.embedded.cuda.attention_kernels import (  # noqa: E402
    Launch,
    PartialResults,
    decode_attention,
    prefill_attention,
    prefill_tile_tokens,
    store,
)
from headrace.inference.embedded.cuda.sampling_kernels import TileStats, feed_tokens, sample_tokens  # noqa: E402
from headrace.inference.weights import buffers  # noqa: E402
from headrace.inference.weights.digest_kernel import TILE_WORDS, TILES, add_digest  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def attend(
    lengths: list[int],
    *,
    heads: int = 4,
    key_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    softcap: float = 0.0,
    spare: int = 4,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's result, and that of plain attention in float64; unused slots are NaN."""
    torch.manual_seed(sum(lengths))
    most = -(-max(lengths) // BLOCK_SIZE)
    blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + 1
    order = random.Random(0).sample(range(1, blocks), blocks - 1)
    keys, values = torch.full((2, blocks * BLOCK_SIZE, key_heads, dim), math.nan, dtype=dtype, device=DEVICE)
    tables = torch.zeros(len(lengths), most, dtype=torch.int32)
    own: list[torch.Tensor] = []
    for row, length in enumerate(lengths):
        count = -(-length // BLOCK_SIZE)
        taken, order = order[:count], order[count:]
        tables[row, :count] = torch.tensor(taken)
        own.append(
            torch.tensor([block * BLOCK_SIZE + place for block in taken for place in range(BLOCK_SIZE)][:length]).long()
        )
        for states in (keys, values):
            states[own[-1].to(DEVICE)] = torch.randn(length, key_heads, dim, device=DEVICE).to(dtype)
    queries = torch.randn(heads, len(lengths), dim, device=DEVICE).to(dtype).transpose(0, 1)
    limit = len(lengths) + spare
    found = split_into_items(np.array(lengths), limit)
    items = np.full((limit, 5), -1)
    items[: len(found)] = found
    output = torch.full((len(lengths), heads, dim), math.nan, dtype=dtype, device=DEVICE)
    on_device = [torch.from_numpy(array).int().to(DEVICE) for array in (np.array(lengths), items)]
    partial = PartialResults.allocate(limit, heads, dim, DEVICE)
    settings = {"scaling": 0.3, "window": window, "softcap": softcap, "launch": launch or Launch(tile=32, stages=2)}
    for _ in range(2):  # in the memory that the first one leaves
        output.fill_(math.nan)
        decode_attention(queries, keys, values, tables.to(DEVICE), *on_device, partial, output, **settings)
    assert not partial.finished.any()
    expected = []
    for row, length in enumerate(lengths):
        seen = own[row][max(0, length - window) if window else 0 :].to(DEVICE)
        key, value = (states[seen].double().repeat_interleave(heads // key_heads, 1) for states in (keys, values))
        scores = torch.einsum("hd,thd->ht", queries[row].double(), key) * 0.3
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        expected.append(torch.einsum("ht,thd->hd", scores.softmax(-1), value))
    return output.double(), torch.stack(expected)


@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_decode_tokens_attend_to_all_keys_in_their_blocks_and_to_nothing_else(window: int, softcap: float) -> None:
    found, expected = attend([1, 2, 16, 17, 33, 70, 5], window=window, softcap=softcap)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 100])
def test_a_long_request_is_split_and_combined_beside_short_ones(window: int) -> None:
    found, expected = attend([3, 700, 40], spare=5, window=window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_requests_without_keys_get_zeros_beside_others() -> None:
    found, expected = attend([40, 0, 300, 0])
    assert not found[[1, 3]].any()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 4, 16), (16, 2, 32), (20, 1, 24), (3, 3, 8)])
def test_any_number_of_heads_shares_a_key_and_sizes_need_not_be_powers_of_two(
    heads: int, key_heads: int, dim: int
) -> None:
    found, expected = attend([30, 9], heads=heads, key_heads=key_heads, dim=dim)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision_is_as_close_as_it_can_be(dtype: torch.dtype, atol: float) -> None:
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    found, expected = attend([200, 31, 64], dtype=dtype, launch=Launch(tile=64))
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def prefill(
    chunks: list[tuple[int, int]],
    *,
    heads: int = 4,
    key_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's result for chunks [start, end) of as many requests, and that of plain attention in float64."""
    torch.manual_seed(0)
    most = max(-(-end // BLOCK_SIZE) for _, end in chunks)
    order = torch.randperm(len(chunks) * most).view(len(chunks), most).int()
    keys, values = torch.full((2, len(chunks) * most * BLOCK_SIZE, key_heads, dim), math.nan, device=DEVICE).to(dtype)
    tokens = sum(end - start for start, end in chunks)
    queries = torch.randn(heads, tokens, dim, device=DEVICE).to(dtype).transpose(0, 1)
    output = torch.full((tokens, heads, dim), math.nan, dtype=dtype, device=DEVICE)
    tiles, expected = [[-1] * 5], torch.zeros(tokens, heads, dim, dtype=torch.float64, device=DEVICE)
    used, per_tile = len(chunks), prefill_tile_tokens(heads, key_heads)
    for row, (start, end) in enumerate(chunks):
        slots = [int(order[row, place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE for place in range(end)]
        for states in (keys, values):
            states[slots] = torch.randn(end, key_heads, dim, device=DEVICE).to(dtype)
        own = [*range(used, used + end - start - 1), row]
        tiles += [[row, first, end - start, start, used] for first in range(0, end - start, per_tile)]
        used += end - start - 1
        for place, query in zip(range(start, end), own, strict=True):
            seen = slots[max(0, place + 1 - window) if window else 0 : place + 1]
            key, value = (states[seen].double().repeat_interleave(heads // key_heads, 1) for states in (keys, values))
            scores = torch.einsum("hd,thd->ht", queries[query].double(), key) * 0.3
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            expected[query] = torch.einsum("ht,thd->hd", scores.softmax(-1), value)
    prefill_attention(
        queries,
        keys,
        values,
        order.to(DEVICE),
        torch.tensor(tiles, dtype=torch.int32, device=DEVICE),
        output,
        scaling=0.3,
        window=window,
        softcap=softcap,
    )
    return output.double(), expected


@pytest.mark.parametrize("window", [0, 1, 7, 40, 100])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_prefill_tokens_attend_to_themselves_and_to_all_keys_before(window: int, softcap: float) -> None:
    found, expected = prefill([(0, 90), (0, 2), (30, 37), (120, 170), (16, 18)], window=window, softcap=softcap)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 4, 16), (14, 2, 32), (20, 1, 24), (3, 3, 8), (8, 8, 256)])
def test_prefill_works_for_any_number_of_heads(heads: int, key_heads: int, dim: int) -> None:
    found, expected = prefill([(0, 75), (20, 26)], heads=heads, key_heads=key_heads, dim=dim)
    torch.testing.assert_close(found, expected, atol=1e-5 * max(1, dim / 64), rtol=0)  # scores grow with the dimension


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
def test_prefill_in_half_precision_is_as_close_as_it_can_be(dtype: torch.dtype, atol: float) -> None:
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    found, expected = prefill([(0, 200), (31, 64)], dtype=dtype, dim=128)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def test_tokens_are_fed_from_the_rows_that_sampled_them() -> None:
    ids = torch.tensor([10, 11, 12], device=DEVICE)
    chosen = torch.tensor([[5.0, 6.0, 7.0, 8.0], [0.0] * 4], dtype=torch.float64, device=DEVICE)
    feed_tokens(ids, torch.tensor([-1, 3, 0], device=DEVICE), chosen)
    assert ids.tolist() == [10, 8, 5]


def test_new_keys_and_values_go_to_their_slots_unless_negative() -> None:
    torch.manual_seed(0)
    keys = torch.randn(3, 5, 24, device=DEVICE).transpose(0, 1)  # [token, head, dimension], as models have them
    values = torch.randn(5, 3, 24, device=DEVICE)
    caches = torch.zeros(2, 40, 3, 24, device=DEVICE)
    slots = [7, -1, 0, 39, 8]
    store(keys, values, *caches, torch.tensor(slots, dtype=torch.int32, device=DEVICE))
    expected = torch.zeros_like(caches)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot], expected[1, slot] = keys[token], values[token]
    assert torch.equal(caches, expected)


@pytest.mark.parametrize("words", [1, TILE_WORDS, 2 * TILE_WORDS * TILES + 3])
def test_the_digest_is_that_of_a_cpu(words: int) -> None:
    row = torch.randint(-(2**63), 2**63 - 1, (words,), generator=torch.Generator().manual_seed(0))
    total = torch.zeros((), dtype=torch.int64, device=DEVICE)
    assert buffers.compiled_digest(DEVICE) is add_digest
    add_digest(row.to(DEVICE), total, *buffers.MIXING)
    assert int(total) == int(buffers.digest(row.view(torch.uint8)))


def chosen(logits: torch.Tensor, temperatures: list[float], uniforms: list[float], tile: int) -> torch.Tensor:
    rows = len(logits)
    found = torch.full((2, rows), math.nan, dtype=torch.float64, device=DEVICE)
    sample_tokens(
        logits.to(DEVICE),
        torch.tensor(temperatures, device=DEVICE),
        torch.tensor(uniforms, dtype=torch.float64, device=DEVICE),
        found,
        TileStats.allocate(rows, logits.shape[1], DEVICE, tile),
        tile=tile,
        warps=4,
    )
    return found.cpu()


@pytest.mark.parametrize("tile", [32, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_number_chooses_the_same_token_as_torch_does(tile: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tile)
    logits = (3 * torch.randn(12, 200)).to(dtype)
    temperatures = [0.0, 0.5, 1.0, 2.0] * 3
    uniforms = [random.Random(row + 1).random() for row in range(12)]
    found = chosen(logits, temperatures, uniforms, tile)
    expected = sample(logits, [SamplingParams(temperature=value) for value in temperatures], uniforms)
    assert found[0].tolist() == expected.tokens.tolist()
    torch.testing.assert_close(found[1].float(), expected.logprobs, atol=1e-5, rtol=0)


def test_numbers_draw_in_proportion_over_tiles_some_of_which_are_impossible() -> None:
    probs = torch.zeros(80)
    probs[[3, 17, 70]] = torch.tensor([0.5, 0.2, 0.3])
    found = chosen(probs.log().expand(10, 80), [1.0] * 10, [(row + 0.5) / 10 for row in range(10)], tile=16)
    counts = torch.bincount(found[0].long(), minlength=80)
    assert (counts[3].item(), counts[17].item(), counts[70].item()) == (5, 2, 3)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_extreme_numbers_never_choose_an_impossible_token(uniform: float) -> None:
    logits = torch.full((1, 100), -math.inf)
    logits[0, [20, 50]] = torch.tensor([0.4, 0.6]).log()
    assert chosen(logits, [1.0], [uniform], tile=16)[0].item() == (20 if uniform == 0 else 50)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_logits_affect_only_their_own_row(bad: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 100)
    logits[1, 40] = bad
    tokens, logprobs = chosen(logits, [1.0, 1.0, 0.0], [0.3, 0.3, 0.3], tile=16)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert ((tokens >= 0) & (tokens < 100)).all()
    logits[1] = bad
    assert chosen(logits, [1.0, 0.0, 0.0], [0.3, 0.3, 0.3], tile=16)[1].isnan().tolist() == [False, True, False]
