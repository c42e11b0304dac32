"""Families of models on vLLM: tokens have the logprobs of a plain forward, before and after new weights.

On CPUs, vLLM's own reload of weights fails for experts (0.32: tensors of other sizes), so that such a run is refused
before its start. Here these families are sampled only.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from headrace.transport.weights import read_marker
from tests.inference.conftest import write_tokenizer
from tests.models.families import EXPERTS, FAMILIES, make_model
from tests.vllm.comparing import assert_like_plain
from tests.vllm.conftest import LONGEST, start

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

EACH_TIME = ("llama", "mistral", "qwen3_moe")
"""Scaled rotary positions, a sliding window, experts; the other families are tested with `full`."""
SIZES = {"vocab_size": 264, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": LONGEST}
"""Ids for every token of the tokenizer, and heads of a size that vLLM's CPU attention has."""
TOLERANCE = 1e-4
"""Weights of this spread give logits of order 100, whose float32 rounding is 1e-5; ten layers' worth of sums."""
PROMPTS = [list(range(n, n + 20)) for n in range(4)]
OTHERS = [pytest.param(family, marks=pytest.mark.full) for family in FAMILIES if family not in EACH_TIME]


@pytest.mark.parametrize("family", [*EACH_TIME, *OTHERS])
async def test_a_family_is_sampled_and_takes_new_weights(
    family: str, tmp_path: Path, publish: Callable[[Any, Version], Path]
) -> None:
    directory = tmp_path / family
    models = {Version(0, 0): make_model(family, 0, **SIZES), Version(0, 1): make_model(family, 1, **SIZES)}
    first, second = models
    models[first].save_pretrained(directory)
    write_tokenizer(directory)
    published = publish(models[second], second)
    backend = await start(directory)
    try:
        for version in [first] if family in EXPERTS else models:
            params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)
            results = await asyncio.gather(*(backend.submit(prompt, params).result() for prompt in PROMPTS))
            for prompt, result in zip(PROMPTS, results, strict=True):
                assert [span[0] for span in result.version_spans] == [version]
                assert_like_plain(prompt, result, models, 1.0, TOLERANCE)
            if version == first and family not in EXPERTS:
                assert await backend.update_weights(published, second) == read_marker(published).checksum
    finally:
        await backend.close()
