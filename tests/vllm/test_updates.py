"""New weights while vLLM samples: every token belongs to the version that it names; what cannot be loaded is refused.

Runs after the tests of sampling, which need the weights that vLLM was started with.
"""

import asyncio
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.inference.backend import GenerationResult
from headrace.inference.schema import SamplingParams
from headrace.inference.vllm.backend import POLL_INTERVAL_S, VllmBackend
from headrace.inference.weights.reading import WeightsError
from headrace.rollout.version import Version
from headrace.transport.adapter import Adapter, AdapterConfig, Matrices, write_adapter
from headrace.transport.weights import WeightStore, read_marker
from tests.inference.plain_forward import plain_logprobs
from tests.inference.weights_sender import SenderProcess
from tests.vllm.comparing import OF_LONG_TEXTS, TOLERANCE, assert_like_plain
from tests.vllm.conftest import make_model, start

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

TEXT = list(range(40))
Publish = Callable[[Any, Version], Path]
_steps = itertools.count(1)


class Policy:
    """The models behind the versions of the shared vLLM: their number is their seed."""

    def __init__(self, backend: VllmBackend, publish: Publish) -> None:
        self.backend, self._publish = backend, publish
        self.models: dict[Version, Any] = {}
        version = backend.state().version
        self.models[version] = make_model(version.step)

    def publish(self) -> tuple[Path, Version]:
        version = Version(0, next(_steps))
        self.models[version] = make_model(version.step)
        return self._publish(self.models[version], version), version

    async def update(self, published: tuple[Path, Version] | None = None) -> Version:
        directory, version = published or self.publish()
        assert await self.backend.update_weights(directory, version) == read_marker(directory).checksum
        assert self.backend.state().version == version
        return version


@pytest.fixture
def policy(backend: VllmBackend, publish: Publish) -> Policy:
    return Policy(backend, publish)


def generating(backend: VllmBackend, count: int, **more: Any) -> list[asyncio.Task[GenerationResult]]:
    params = SamplingParams(**{"temperature": 0.8, "max_tokens": 300, "ignore_eos": True, "logprobs": 0, **more})
    return [asyncio.ensure_future(backend.submit(TEXT[n:], params).result()) for n in range(count)]


async def started(backend: VllmBackend) -> None:
    """Until a request that joins the others has some tokens."""
    generation = backend.submit(TEXT, SamplingParams(max_tokens=300, ignore_eos=True))
    count = 0
    async for piece in generation.chunks():
        count += len(piece.token_ids)
        if count >= 10:
            generation.cancel()
            return


async def test_tokens_belong_to_the_version_that_sampled_them(policy: Policy) -> None:
    backend = policy.backend
    before = backend.state().version
    ready = [policy.publish(), policy.publish()]  # before, so that the requests do not end meanwhile
    running = generating(backend, 6, max_tokens=450)
    await started(backend)
    first = await policy.update(ready[0])
    await started(backend)
    second = await policy.update(ready[1])
    late = generating(backend, 1, max_tokens=5)
    for n, result in enumerate(await asyncio.gather(*running)):
        assert [span[0] for span in result.version_spans] == [before, first, second]
        assert_like_plain(TEXT[n:], result, policy.models, 0.8, OF_LONG_TEXTS)
    assert [span[0] for span in (await late[0]).version_spans] == [second]
    assert not backend.state().paused
    await asyncio.sleep(2 * POLL_INTERVAL_S)
    moved_aside = (await backend._control.metrics()).preemptions
    assert moved_aside >= 6 and backend.state().preemptions == 0


async def test_a_paused_engine_takes_weights_and_stays_paused(policy: Policy) -> None:
    backend = policy.backend
    running = generating(backend, 2, max_tokens=200)
    await started(backend)
    await backend.pause()
    version = await policy.update()
    assert backend.state().paused
    meanwhile = generating(backend, 1, max_tokens=5)
    done, _ = await asyncio.wait({*running, *meanwhile}, timeout=0.5)
    assert not done
    await backend.resume()
    for n, result in enumerate(await asyncio.gather(*running)):
        assert result.version_spans[-1][0] == version and result.version_spans[-1][1] > 0
        assert_like_plain(TEXT[n:], result, policy.models, 0.8, OF_LONG_TEXTS)
    assert (await meanwhile[0]).version_spans == [(version, 0, 5)]


async def test_a_cached_prompt_is_computed_again_with_new_weights(policy: Policy) -> None:
    prompt = [5, *range(60, 250)]
    for _ in range(3):
        [version] = {await policy.update()}
        for _ in range(2):
            params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, logprobs=0)
            result = await policy.backend.submit(prompt, params).result()
            assert_like_plain(prompt, result, policy.models[version], 1.0)
    assert result.cached_tokens > 0


async def test_a_version_that_is_loaded_is_acknowledged_again(policy: Policy) -> None:
    directory, version = policy.publish()
    checksum = await policy.backend.update_weights(directory, version)
    (directory / "model.safetensors").unlink()
    assert await policy.backend.update_weights(directory, version) == checksum


def partial(directory: Path, target: Path, version: Version) -> Path:
    def write(draft: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, draft / "model.safetensors")

    store = WeightStore(target)
    store.publish(version, write)
    return store.path(version)


async def test_what_cannot_be_loaded_is_refused_and_nothing_changes(policy: Policy, tmp_path: Path) -> None:
    backend = policy.backend
    before = await policy.update()
    directory, version = policy.publish()
    damaged = tmp_path / "damaged"
    shutil.copytree(directory, damaged)
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    (tmp_path / "empty").mkdir()
    running = generating(backend, 3)
    for path, asked, message in [
        (tmp_path / "nowhere", version, r"COMPLETE\.json"),
        (tmp_path / "empty", version, r"COMPLETE\.json"),
        (directory, Version(0, 9999), "0-9999"),
        (damaged, version, "is damaged"),
        (partial(directory, tmp_path / "partial", version), version, "tensors are missing: model.layers.1.mlp.up_proj"),
    ]:
        with pytest.raises(WeightsError, match=message):
            await backend.update_weights(path, asked)
        assert backend.state().version == before
    for n, result in enumerate(await asyncio.gather(*running)):
        assert [span[0] for span in result.version_spans] == [before]
        assert_like_plain(TEXT[n:], result, policy.models, 0.8, OF_LONG_TEXTS)
    assert await backend.update_weights(directory, version) == read_marker(directory).checksum


async def test_a_disconnecting_caller_does_not_leave_the_engine_between_two_versions(policy: Policy) -> None:
    backend = policy.backend
    directory, version = policy.publish()
    running = generating(backend, 2)
    update = asyncio.ensure_future(backend.update_weights(directory, version))
    await asyncio.sleep(0.03)
    update.cancel()
    for n, result in enumerate(await asyncio.gather(*running)):
        assert_like_plain(TEXT[n:], result, policy.models, 0.8, OF_LONG_TEXTS)
    assert await backend.update_weights(directory, version) == read_marker(directory).checksum
    assert not backend.state().paused


async def test_a_kept_cache_serves_requests_in_flight_only(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = policy.backend
    monkeypatch.setattr(backend, "_clear_cache", False)
    prompt = [5, *range(60, 250)]
    params = SamplingParams(temperature=1.0, max_tokens=300, ignore_eos=True, logprobs=0)
    ready = policy.publish()
    old = asyncio.ensure_future(backend.submit(prompt, params).result())
    await started(backend)
    version = await policy.update(ready)
    fresh = await backend.submit(prompt, SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0)).result()
    assert_like_plain(prompt, fresh, policy.models[version], 1.0)
    result = await old
    assert len(result.version_spans) == 2
    recomputed = plain_logprobs(policy.models[version], prompt + result.token_ids)[len(prompt) - 1 :]
    start = result.version_spans[1][1]
    assert (torch.tensor(result.logprobs[start:]) - recomputed[start:]).abs().max() > 0.01
    monkeypatch.undo()
    await policy.update()


def adapter(seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    layers = {
        f"model.layers.{n}.self_attn.{name}": Matrices(
            torch.randn(4, width, generator=generator) / 4, torch.randn(size, 4, generator=generator) / 4
        )
        for n in range(2)
        for name, width, size in (("q_proj", 32, 128), ("v_proj", 32, 64), ("o_proj", 128, 32))
    }
    return Adapter(AdapterConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"]), layers)


def adapted(seed: int) -> Any:
    model = make_model(0)
    found = adapter(seed)
    with torch.no_grad():
        for layer, (a, b) in found.layers.items():
            model.get_submodule(layer).weight += found.config.scaling * (b @ a)
    return model


async def test_weights_come_over_the_link_while_it_samples(policy: Policy, tmp_path: Path) -> None:
    backend = policy.backend
    store = WeightStore(tmp_path / "linked")
    trainer = await asyncio.to_thread(SenderProcess, store.directory, "stream", "cpu")
    try:
        version = Version(0, next(_steps))
        policy.models[version] = make_model(version.step)
        policy.models[version].save_pretrained(tmp_path / "next")
        checksum = await asyncio.to_thread(trainer.publish, version, tmp_path / "next" / "model.safetensors")
        assert not list(store.path(version).glob("*.safetensors"))
        running = generating(backend, 2, max_tokens=450)
        await started(backend)
        assert await backend.update_weights(store.path(version), version) == checksum
    finally:
        trainer.kill()
    for n, result in enumerate(await asyncio.gather(*running)):
        assert result.version_spans[-1][0] == version
        assert_like_plain(TEXT[n:], result, policy.models, 0.8, OF_LONG_TEXTS)


async def test_a_published_adapter_is_merged_with_the_model_that_vllm_was_started_with(
    policy: Policy, tmp_path: Path
) -> None:
    backend = policy.backend
    version = Version(0, next(_steps))
    store = WeightStore(tmp_path / "adapters")
    store.publish(version, lambda draft: write_adapter(draft, adapter(1)))
    assert await backend.update_weights(store.path(version), version) == read_marker(store.path(version)).checksum
    [running] = generating(backend, 1, max_tokens=30)
    assert_like_plain(TEXT, await running, {version: adapted(1)}, 0.8, OF_LONG_TEXTS)
    await policy.update()


async def test_versions_of_an_adapter_are_served_side_by_side(model_directory: Path, tmp_path: Path) -> None:
    backend = await start(model_directory, vllm={"max_lora_rank": 8})
    try:
        store = WeightStore(tmp_path / "adapters")
        first, second = Version(0, 1), Version(0, 2)
        models = {Version(0, 0): make_model(0), first: adapted(1), second: adapted(2)}
        for version in (first, second):
            store.publish(version, lambda draft, version=version: write_adapter(draft, adapter(version.step)))
        running = []
        for version in (first, second):
            running += generating(backend, 2, max_tokens=100)
            await started(backend)
            assert await backend.update_weights(store.path(version), version)
            shutil.rmtree(store.path(version))
        running += generating(backend, 2, max_tokens=100)
        results = await asyncio.gather(*running)
        for n, result in enumerate(results):
            assert result.version_spans == [(Version(0, n // 2), 0, 100)]
            assert_like_plain(TEXT[n % 2 :], result, models, 0.8, OF_LONG_TEXTS)

        store.publish(Version(0, 3), lambda draft: write_adapter(draft, adapter(3)))
        await backend.load_adapter("mine", store.path(Version(0, 3)))
        assert backend.state().adapters == ["mine"]
        named = backend.submit(
            TEXT, SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0, temperature=0.8), adapter="mine"
        )
        result = await named.result()
        plain = plain_logprobs(adapted(3), TEXT + result.token_ids, 0.8)[len(TEXT) - 1 :]
        torch.testing.assert_close(torch.tensor(result.logprobs), plain, atol=TOLERANCE, rtol=0)
        with pytest.raises(WeightsError, match=r"adapter_config\.json"):
            await backend.load_adapter("mine", tmp_path)
        await backend.unload_adapter("mine")
        assert backend.state().adapters == []

        full = WeightStore(tmp_path / "full")
        full.publish(Version(0, 4), make_model(4).save_pretrained)
        assert await backend.update_weights(full.path(Version(0, 4)), Version(0, 4))
        [after] = generating(backend, 1, max_tokens=30)
        assert_like_plain(TEXT, await after, {Version(0, 4): make_model(4)}, 0.8, OF_LONG_TEXTS)
    finally:
        await backend.close()
