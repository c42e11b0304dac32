"""Plans: what is kept is what pays most for its memory, and what is planned fits."""

from dataclasses import replace

import pytest

from headrace.trainer.memory_plan import GIB, MODES, MemoryPlan, ModelSizes, RecomputeMode, make_memory_plan

QWEN3 = ModelSizes(
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151_936,
)
STATE = 16 * 596_000_000


def plan(limit: float, longest: int = 16384, mode: RecomputeMode | str = "auto", state: int = STATE) -> MemoryPlan:
    return make_memory_plan(QWEN3, int(limit * GIB), state=state, chunk=4096, longest=longest, mode=mode)


def test_bytes_of_a_token_are_those_counted_by_hand():
    """Qwen3-0.6B: queries 2048, keys 1024, feed-forward 3072, hidden 1024; 4 bytes in the stream, 2 elsewhere."""
    full = 4 * 1024
    attention = full + 2 * 2048 + 4 * 16
    selective = attention + 2 * (2048 + 2 * 1024 + 1024 + 2 * 3072)
    # Two norms, rotated queries and keys, the activation; the second stream instead of the output projection.
    everything = selective + 2 * (2 * 1024 + 2048 + 1024 + 3072) + (4 - 2) * 1024
    assert QWEN3.kept_bytes() == {"full": full, "attention": attention, "selective": selective, False: everything}


def test_experts_keep_the_inputs_and_outputs_of_a_token_once_for_each_that_it_takes():
    dense, experts = QWEN3.kept_bytes(), replace(QWEN3, experts_per_token=8).kept_bytes()
    outputs = 2 * 8 * 1024
    assert [experts[mode] - dense[mode] for mode in MODES] == [0, 0, outputs, 3 * outputs]


def test_frozen_experts_keep_the_outputs_that_the_gates_need_and_no_inputs():
    """The gradient of a gate needs the output of its expert; that of frozen weights needs none of their inputs."""
    learn = replace(QWEN3, experts_per_token=8)
    learned, frozen = learn.kept_bytes(), replace(learn, experts_learn=False).kept_bytes()
    activation, stream, outputs = 2 * 3072, 4 * 1024, 2 * 8 * 1024
    assert [learned[mode] - frozen[mode] for mode in MODES] == [0, 0, 0, activation + stream + 2 * outputs]


def test_the_plan_of_an_adapter_beside_frozen_experts_is_what_a_gpu_took():
    """24 layers of Qwen3-30B-A3B, rank 16, one row of 16k tokens on an H200: 68.1 GiB were allocated at the peak."""
    sizes = ModelSizes(
        **{"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"head_dim": 128, "intermediate_size": 8 * 768, "vocab_size": 151_936},
        **{"num_experts": 128, "experts_per_token": 8, "expert_size": 768, "experts_learn": False},
    )
    attention = 2048 * 128 * (2 * 32 + 2 * 4)
    base = 24 * (attention + 128 * (3 * 2048 * 768 + 2048)) + 2 * 151_936 * 2048
    adapter = 24 * 16 * (4 * 2048 + 128 * (2 * 32 + 2 * 4))
    state = 2 * base + (4 + 12) * adapter  # the base in bfloat16; float32 matrices, their gradients and Adam's moments
    chosen = make_memory_plan(sizes, 130 * GIB, state=state, chunk=4096, longest=16384, head_learns=False)
    assert set(chosen.modes) == {False}
    assert 68.1 <= chosen.bytes / GIB <= 68.1 + 1.5  # of it .5 reserved for libraries, which torch does not count


def test_more_memory_never_means_more_recomputing():
    plans = [plan(gib / 4) for gib in range(44, 200)]
    kept = [(each.keeps_logits, sum(MODES.index(mode) for mode in each.modes)) for each in plans]
    assert kept == sorted(kept)
    assert set(plan(13).modes) == {"full", "attention"}
    assert set(plan(40).modes) == {False}


@pytest.mark.parametrize("limit", [13, 14.5, 16, 20, 24, 30, 40, 100])
def test_plans_fit_and_have_two_neighbours_of_the_ladder_the_lighter_one_last(limit: float):
    chosen = plan(limit)
    assert chosen.bytes <= limit * GIB
    places = [MODES.index(mode) for mode in chosen.modes]
    assert len(places) == 28
    assert places == sorted(places)
    assert places[-1] - places[0] <= 1


def test_logits_are_kept_once_products_are_and_before_the_rest():
    assert not plan(22).keeps_logits
    between = plan(29)
    assert between.keeps_logits
    assert "selective" in between.modes


def test_a_frozen_head_keeps_no_logits():
    chosen = make_memory_plan(QWEN3, 100 * GIB, state=STATE, chunk=4096, longest=16384, head_learns=False)
    assert not chosen.keeps_logits
    assert set(chosen.modes) == {False}


def test_a_row_is_as_long_as_fits_but_never_shorter_than_a_sequence():
    assert plan(16, longest=100).row_tokens == 16384
    assert plan(11, longest=100).row_tokens < 16384
    assert plan(11, longest=100).bytes <= 11 * GIB
    hopeless = plan(10, longest=65536)
    assert (hopeless.row_tokens, set(hopeless.modes)) == (65536, {"full"})
    assert hopeless.bytes > 10 * GIB


def test_a_mode_that_was_asked_for_is_the_only_one():
    assert set(plan(100, mode="full").modes) == {"full"}
    assert set(plan(12, longest=2048, mode=False).modes) == {False}
    assert plan(12, longest=2048, mode=False).row_tokens < 16384


def test_a_plan_says_what_it_is():
    text = str(MemoryPlan(("full", "attention", "attention"), True, 4096, 3 * GIB // 2))
    assert text == (
        "3 layers: 1 recompute everything and 2 recompute all but attention, logits are kept; "
        "about 1.5 GiB for rows of 4096 tokens"
    )
