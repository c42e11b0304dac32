"""Random traffic through the engine for GPUs: cancelled and failed requests, NaN, preemption, drafts.

A rule takes the place of the model: a token follows from the one before and the request's random number, and its
logprob names the one before. The rule notes the token at each place of the KV cache. So wrong tokens, keys of other
tokens and blocks that were registered too early are found, whatever the order of events was.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is in .venv-triton: run `make test-triton`")

from headrace.inference.backend import EngineError, RequestCancelled
from headrace.inference.embedded import drafts
from headrace.inference.embedded.block_manager import BLOCK_SIZE
from headrace.inference.embedded.cuda.runner import CudaRunner
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import SEED_MODULUS, Request
from headrace.inference.schema import SamplingParams
from tests.inference.plain_forward import assert_nothing_left, run_all

FIRST, TOKENS, EOS = 5, 20, 24
JUMPS = 0.15
"""Share of the tokens that do not follow in the usual order, and end drafts."""
STEPS, MAX_MODEL_LEN = 250, 128


def following(ids: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return the next tokens."""
    jumps = np.where(uniforms < JUMPS, (1e6 * uniforms).astype(np.int64) % TOKENS, 0)
    return (ids - FIRST + 1 + jumps) % TOKENS + FIRST


class RuleRunner(CudaRunner):
    """The runner for GPUs with the rule in the place of the model."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.stored: dict[int, int] = {}
        """The token of each slot of the KV cache."""
        self.fails = self.gives_nan = False
        """Whether the next step does."""
        self.bad_token = 0
        """The logprob of what follows this token is NaN."""
        super().__init__(*args, **options, compile=False, graphs=False)

    def _warm_up(self) -> None:
        pass

    def _compute(self, shape: Any) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise RuntimeError("injected")
        rows, inputs, sampled = min(shape.tokens, self._rows.count), self._rows.inputs, self._sampled.numpy()
        ids, sources = inputs.ids[: shape.tokens].numpy().copy(), inputs.sources[:rows].numpy()
        ids[:rows] = np.where(sources >= 0, sampled[0][sources], ids[:rows])
        slots = inputs.slots[: shape.tokens].tolist()
        self.stored.update((slot, token) for slot, token in zip(slots, ids.tolist(), strict=True) if slot >= 0)
        sampled[:, :rows] = following(ids[:rows], inputs.uniforms[:rows].numpy()), -ids[:rows]
        sampled[1, :rows][ids[:rows] == self.bad_token] = np.nan
        if self.gives_nan:
            sampled[1, self._rows._sampled_rows - 1] = np.nan
            self.gives_nan = False
        return torch.zeros(rows, 1)


def make_engine(model: Any, *, max_running: int, **settings: Any) -> tuple[Engine, RuleRunner]:
    sizes = {"max_running": max_running, "max_model_len": MAX_MODEL_LEN}
    engine = Engine(model, **sizes, **settings)
    engine.runner = runner = RuleRunner(model, engine.scheduler.blocks.num_usable + 1, engine.adapters, **sizes)
    return engine, runner


@pytest.fixture
def block_tokens(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, list[int]]:
    """The tokens of each block, by its hash."""
    tokens: dict[bytes, list[int]] = {}
    block_hashes = Request.block_hashes

    def noted(request: Request, count: int) -> list[bytes]:
        hashes = block_hashes(request, count)
        for start, found in zip(range(0, count * BLOCK_SIZE, BLOCK_SIZE), hashes, strict=True):
            tokens.setdefault(found, request.tokens[start : start + BLOCK_SIZE])
        return hashes

    monkeypatch.setattr(Request, "block_hashes", noted)
    monkeypatch.setattr(drafts, "PAUSE_STEPS", 0)
    return tokens


def assert_cache_is_right(engine: Engine, stored: dict[int, int], block_tokens: dict[bytes, list[int]]) -> None:
    """Compare the KV cache with the tokens of running requests, and with those of the blocks that others may share."""
    for request in engine.scheduler.running if engine._in_flight is None else ():
        computed = min(request.computed, len(request.tokens) - 1) if request.is_verified else 0
        slots = [request.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(computed)]
        assert [stored.get(slot) for slot in slots] == request.tokens[:computed]
    for block, digest in engine.scheduler.blocks._hashes.items() if engine._in_flight is None else ():
        assert [stored.get(block * BLOCK_SIZE + at) for at in range(BLOCK_SIZE)] == block_tokens[digest]


def assert_tokens_follow(request: Request) -> None:
    """Compare a finished request with the rule, and with its random numbers if it has a seed."""
    tokens, prompt = request.tokens, request.prompt_length
    assert request.logprobs == [-token for token in tokens[prompt - 1 : -1]]
    if request.params.seed is not None:
        numbers = random.Random(request.params.seed % SEED_MODULUS)
        for before, token in zip(tokens[prompt - 1 :], tokens[prompt:], strict=False):
            assert following(np.array([before]), np.array([numbers.random()])).item() == token


@pytest.mark.parametrize("speculative_tokens", [0, 3, 8, 20])
@pytest.mark.parametrize("seed", range(20))
def test_tokens_and_cache_are_right_in_any_order_of_events(
    model: Any, block_tokens: dict[bytes, list[int]], speculative_tokens: int, seed: int
) -> None:
    events = random.Random(seed)
    most = [4, 16, 40][seed % 3]
    engine, runner = make_engine(
        model,
        max_running=80 if seed % 4 else 16,
        kv_blocks=12 if seed % 3 == 0 else None,  # requests are preempted
        eos_token_ids=[EOS] if seed % 2 else [],
        speculative_tokens=speculative_tokens,
    )
    prompts = [[FIRST + events.randrange(TOKENS) for _ in range(events.choice([5, 15, 16, 17, 30]))] for _ in range(3)]
    requests: list[Request] = []
    for step in range(STEPS):
        if step < STEPS - 50 and events.random() < 0.25 and len(engine.scheduler.running) < most:
            own_seed = events.randrange(1000) if events.random() < 0.5 else None
            params = SamplingParams(max_tokens=events.randint(1, 70), seed=own_seed)
            requests.append(engine.submit(events.choice(prompts), params))
        if events.random() < 0.15 and (unfinished := [request for request in requests if not request.is_done]):
            engine.cancel(events.choice(unfinished))
        if seed >= 6:  # failures end the chains of events that others need
            runner.fails, runner.gives_nan = events.random() < 0.02, events.random() < 0.02
        engine.step()
        assert_cache_is_right(engine, runner.stored, block_tokens)
    while engine.has_work:
        engine.step()
        assert_cache_is_right(engine, runner.stored, block_tokens)
    for request in requests:
        error = request.future.exception()
        assert error is None or isinstance(error, EngineError | RequestCancelled)
        if error is None:
            assert_tokens_follow(request)
    assert any(request.future.exception() is None for request in requests)
    assert (engine.tokens_accepted > 0) == (speculative_tokens > 0)
    assert_nothing_left(engine)


@pytest.mark.parametrize("speculative_tokens", [0, 8])
def test_no_block_is_shared_whose_last_token_was_in_a_step_that_failed(
    model: Any, block_tokens: dict[bytes, list[int]], speculative_tokens: int
) -> None:
    for steps in range(1, 2 * BLOCK_SIZE):
        engine, runner = make_engine(model, max_running=16, speculative_tokens=speculative_tokens)
        request = engine.submit([*range(FIRST, FIRST + 10)], SamplingParams(max_tokens=60, seed=1))
        for _ in range(steps):
            engine.step()
        if request.is_done:
            break
        runner.fails = True
        run_all(engine)
        assert isinstance(request.future.exception(), EngineError)
        assert_cache_is_right(engine, runner.stored, block_tokens)
    assert steps > BLOCK_SIZE or speculative_tokens


@pytest.mark.parametrize("speculative_tokens", [0, 8])
def test_blocks_of_a_request_that_fails_are_cleared_also_after_tokens_of_the_same_step(
    model: Any, block_tokens: dict[bytes, list[int]], monkeypatch: pytest.MonkeyPatch, speculative_tokens: int
) -> None:
    monkeypatch.setitem(globals(), "JUMPS", 0.0)
    engine, runner = make_engine(model, max_running=16, speculative_tokens=speculative_tokens)
    prompt, params = [*range(FIRST, FIRST + 5)], SamplingParams(max_tokens=10, ignore_eos=True)
    engine.submit(prompt, params)
    run_all(engine)
    runner.bad_token = FIRST + 9
    request = engine.submit(prompt, params)
    while not request.is_done:
        blocks = list(request.blocks)
        engine.step()
    assert isinstance(request.future.exception(), EngineError)
    assert set(blocks) <= {*engine.scheduler.unverified_blocks}
    assert (engine.tokens_accepted > 0) == (speculative_tokens > 0)
