"""Experts in vLLM on a GPU: new weights from files and over the link, and its routes replayed by the trainer."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.inference.schema import SamplingParams, read_routes
from headrace.inference.vllm.backend import VllmBackend
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import ROUTES, Sample, Turn
from headrace.rollout.version import Version
from headrace.trainer.model import PackedModel
from headrace.transport.weights import WeightStore
from tests.inference.conftest import write_tokenizer
from tests.inference.plain_forward import plain_logprobs
from tests.inference.weights_sender import SenderProcess
from tests.models.families import make_model
from tests.models.test_routes import own_routes, scores
from tests.vllm.conftest import PYTHON, start

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available() or not PYTHON, reason="needs a GPU and $HEADRACE_VLLM_PYTHON"),
    pytest.mark.timeout(600),
]

SIZES = {
    **{"vocab_size": 264, "hidden_size": 256, "head_dim": 64, "max_position_embeddings": 512},
    **{"num_experts": 8, "moe_intermediate_size": 128, "initializer_range": 0.05},
}
"""Of which vLLM has kernels; logprobs of two such models differ by .5 and more, those of one by rounding."""
PROMPTS = [list(range(n, n + 40)) for n in range(8)]
ROUNDING = 0.05
"""Mean difference of logprobs in bfloat16, whose 8 bits are .4% of logits of order 1, over two layers."""


async def sample(backend: VllmBackend, **options: Any) -> list[Any]:
    params = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0, **options)
    return await asyncio.gather(*(backend.submit(prompt, params).result() for prompt in PROMPTS))


def distance(model: Any, results: list[Any]) -> float:
    """Return the mean absolute difference of the logprobs of sampled tokens to those of a plain model."""
    total = torch.zeros(())
    for prompt, result in zip(PROMPTS, results, strict=True):
        plain = plain_logprobs(model, prompt + result.token_ids)[len(prompt) - 1 :]
        total += (plain - torch.tensor(result.logprobs)).abs().mean() / len(PROMPTS)
    return float(total)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Version, tuple[Any, Path]]:
    made = {}
    for seed in range(3):
        model, directory = make_model("qwen3_moe", seed, **SIZES), tmp_path_factory.mktemp("models")
        model.save_pretrained(directory)
        write_tokenizer(directory)
        made[Version(0, seed)] = (model, directory)
    return made


async def test_experts_take_new_weights_from_files_and_over_the_link(
    models: dict[Version, tuple[Any, Path]], tmp_path: Path
) -> None:
    first, by_files, by_link = models
    store, linked = WeightStore(tmp_path / "files"), WeightStore(tmp_path / "linked")
    store.publish(by_files, models[by_files][0].save_pretrained)
    trainer = SenderProcess(linked.directory, "auto", "cuda:0")
    backend = await start(models[first][1])
    try:
        for version, place in ((first, None), (by_files, store), (by_link, linked)):
            if place is linked:
                await asyncio.to_thread(trainer.publish, version, models[version][1] / "model.safetensors")
            if place is not None:
                await backend.update_weights(place.path(version), version)
            results = await sample(backend)
            found = {each: distance(model, results) for each, (model, _) in models.items()}
            print(f"{version}: {found}")
            assert found[version] < ROUNDING < 4 * ROUNDING < min(found[each] for each in models if each != version)
    finally:
        trainer.kill()
        await backend.close()


async def test_the_trainer_replays_the_experts_that_vllm_took(models: dict[Version, tuple[Any, Path]]) -> None:
    model, directory = models[Version(0, 0)]
    backend = await start(directory, routed_experts=True)
    try:
        results = await sample(backend, routed_experts=True)
    finally:
        await backend.close()
    samples: list[Sample] = []
    different = total = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        routes, count = read_routes(result.routed_experts), len(result.token_ids)
        assert len(routes) == len(prompt) + count - 1
        samples += merge_turns([Turn(prompt, result.token_ids, result.logprobs, [0] * count, 1.0, routes=routes)])
        samples[-1].set_stream("advantages", samples[-1].mask.astype("float32"))
        rows = samples[-1].streams[ROUTES][:-1] != own_routes(model, prompt + result.token_ids)[:-1]
        different, total = different + int(rows.any(1).sum()), total + len(rows)
    print(f"other experts than the plain model in float32: {different} of {total} tokens")
    assert different < 0.2 * total  # of random experts 96% would differ: two of eight, in two layers
    mean = {}
    for mode in ("record", "replay"):
        packed = PackedModel(directory, dtype=torch.bfloat16, router_replay=mode)  # type: ignore[arg-type]
        found, engines = scores(packed, samples)
        mean[mode] = float((found.detach().cpu() - engines).abs().mean())
    print(f"mean difference of logprobs: {mean}")
    assert mean["replay"] < ROUNDING
    assert mean["replay"] <= mean["record"]
