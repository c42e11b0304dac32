"""Speculative decoding on a GPU: exact logprobs, the same tokens for a seed, and the model's own distribution."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.inference.embedded import drafts
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import SamplingParams
from tests.gpu.test_engine import CONFIGS, SIZES, assert_exact, make_model, run_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WAYS: list[dict[str, bool]] = [{}, {"compile": False}, {"compile": False, "graphs": False}]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "PAUSE_STEPS", 0)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tokens_of_drafts_have_the_logprobs_of_the_plain_model(kind: str, dtype: torch.dtype) -> None:
    model = make_model(kind, dtype=dtype)
    engine = Engine(model, max_model_len=300, max_running=64, compile=False, speculative_tokens=8)
    requests: list[Any] = []
    for round_number in range(2):  # requests of the second round sample what those of the first did, or soon differ
        for seed, length in itertools.product(range(2), (5, 90)):
            params = SamplingParams(max_tokens=70 + 20 * round_number, seed=seed, ignore_eos=True)
            requests.append(engine.submit([7] * length, params))
            requests.append(engine.submit([7] * length, SamplingParams(max_tokens=50, temperature=0.3)))
        run_all(engine)
    assert engine.tokens_accepted > 100
    assert_exact(requests, model)


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_a_seed_samples_the_same_tokens_in_fewer_steps(ways: dict[str, bool]) -> None:
    def run(speculative_tokens: int) -> tuple[Engine, list[list[int]]]:
        settings: dict[str, Any] = {"max_model_len": 200, "max_running": 64, **ways}
        engine = Engine(make_model(), **settings, speculative_tokens=speculative_tokens)
        tokens = []
        for _ in range(2):
            engine.reset_counters()
            params = [SamplingParams(max_tokens=100, seed=seed, ignore_eos=True) for seed in range(8)]
            requests = [engine.submit([9] * 20, each) for each in params]
            run_all(engine)
            tokens += [request.tokens for request in requests]
        return engine, tokens

    plain, expected = run(0)
    drafting, tokens = run(8)
    assert tokens == expected
    assert drafting.steps < plain.steps / 4
    assert drafting.tokens_sampled == plain.tokens_sampled


def sequences(engine: Engine, prompt: list[int], length: int, count: int) -> Iterator[tuple[int, ...]]:
    """What `count` requests sample, 16 at a time, so that there are drafts from those before."""
    for _ in range(count // 16):
        requests = [engine.submit(prompt, SamplingParams(max_tokens=length, ignore_eos=True)) for _ in range(16)]
        run_all(engine)
        yield from (tuple(request.tokens[len(prompt) :]) for request in requests)


def test_the_distribution_is_the_models_own() -> None:
    """Chi-square over all sequences of three tokens: 5.5 standard deviations are one false alarm in 50 million."""
    vocab, count = 8, 16_000
    sizes = {**SIZES, "vocab_size": vocab, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers.Qwen3Config(**sizes, head_dim=32)).cuda().eval()
    prompt = [3, 4, 5, 6]
    every = list(itertools.product(range(vocab), repeat=3))
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *each] for each in every], device="cuda")
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.double(), -1)
        chosen = logprobs[:, 3:-1].gather(-1, ids[:, 4:, None])[..., 0].sum(-1)
    expected = count * chosen.exp().cpu()
    engine = Engine(model, max_model_len=32, max_running=64, compile=False, speculative_tokens=4)
    observed = Counter(sequences(engine, prompt, 3, count))
    assert engine.tokens_accepted > count / 20
    counts = torch.tensor([float(observed[each]) for each in every], dtype=torch.float64)
    is_rare = expected < 5  # joined to one cell
    cells = [torch.cat([each[~is_rare], each[is_rare].sum()[None]]) for each in (counts, expected)]
    cells = [each[cells[1] > 0] for each in cells]
    freedom = len(cells[0]) - 1
    chi_square = ((cells[0] - cells[1]) ** 2 / cells[1]).sum().item()
    assert abs(chi_square - freedom) < 5.5 * (2 * freedom) ** 0.5, (chi_square, freedom)
