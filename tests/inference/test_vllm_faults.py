"""The backend over a stand-in for vLLM that is slow, refuses, or answers what it should not."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.inference.backend import EngineError, EngineStopped
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.reading import WeightsUnreachable
from headrace.rollout.version import Version
from headrace.transport.adapter import Adapter, AdapterConfig, Matrices, write_adapter
from headrace.transport.weights import WeightStore
from tests.inference.vllm_serving import publish, serving, tokens_of

SHORT = SamplingParams(max_tokens=2)
MORE = SamplingParams(max_tokens=40, ignore_eos=True)
V1, V2 = Version(0, 1), Version(0, 2)


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.inference.vllm.backend.POLL_INTERVAL_S", 0.01)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


def publish_adapter(directory: Path, version: Version) -> Path:
    torch = pytest.importorskip("torch")
    config = AdapterConfig(r=4, lora_alpha=4, target_modules=["q_proj"])
    layers = {"model.q_proj": Matrices(torch.ones(4, 2), torch.ones(3, 4))}
    store = WeightStore(directory / "weights")
    store.publish(version, lambda draft: write_adapter(draft, Adapter(config, layers)))
    return store.path(version)


async def test_answers_that_make_no_sense_end_their_requests_and_metrics_are_asked_for_again(tmp_path: Path) -> None:
    async with serving(tmp_path, GARBLES="3") as served:
        for token in (21, 22, 23) * 3:  # more than may wait
            with pytest.raises(EngineError, match="invalid response"):
                await asyncio.wait_for(served.backend.submit([token], SHORT).result(), 5)
        with pytest.raises(EngineError, match="invalid response"):
            await asyncio.wait_for(tokens_of(served.backend.submit([21], SHORT), 1), 5)
        assert (await served.backend.submit([1], SHORT).result()).token_ids == [10, 11]
        await until(lambda: served.backend.state().kv_usage == 0.25)


async def test_a_new_version_is_acknowledged_although_the_old_one_cannot_be_unloaded(tmp_path: Path) -> None:
    async with serving(tmp_path, adapters=True, SLOW="unload_adapter", BREAKS="unload_adapter") as served:
        await served.backend.update_weights(publish_adapter(tmp_path, V1), V1)
        update = asyncio.ensure_future(served.backend.update_weights(publish_adapter(tmp_path, V2), V2))
        await until(lambda: served.asked("unload_adapter"))
        assert not update.done() and served.backend.state().version == V2
        assert (await served.backend.submit([1], SHORT).result()).version_spans == [(V2, 0, 2)]
        assert served.asked("generate")[-1]["model"] == "policy@0-2#1"
        await update


async def test_an_adapter_stays_as_long_as_anybody_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.inference.vllm.backend.SPARE_REQUESTS", -1)  # one request at a time
    async with serving(tmp_path, adapters=True) as served:
        backend = served.backend
        await backend.update_weights(publish_adapter(tmp_path, V1), V1)
        running, behind = (asyncio.ensure_future(backend.submit([1], MORE).result()) for _ in range(2))
        await until(lambda: served.asked("generate"))
        await backend.update_weights(publish_adapter(tmp_path, V2), V2)
        for found in (await running, await behind):
            assert found.version_spans == [(V1, 0, 40)]
        await until(lambda: served.asked("unload_adapter"))
        assert [asked["lora_name"] for asked in served.asked("unload_adapter")] == ["policy@0-1#0"]
        assert served.routes().index("unload_adapter") > max(
            place for place, route in enumerate(served.routes()) if route == "generate"
        )

        await backend.update_weights(publish(tmp_path, Version(0, 3)), Version(0, 3))  # a whole model
        # By the update itself or by the periodic task, whichever comes first.
        await until(lambda: len(served.asked("unload_adapter")) == 2)
        assert [asked["lora_name"] for asked in served.asked("unload_adapter")] == ["policy@0-1#0", "policy@0-2#1"]
        await until(lambda: not list((tmp_path / "copies").iterdir()))


async def test_who_loses_its_place_to_an_update_does_not_count_as_preempted(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        backend = served.backend
        running = asyncio.ensure_future(backend.submit([1], MORE).result())
        await tokens_of(backend.submit([1], MORE), 3)
        await until(lambda: backend.state().preemptions == 2)
        await backend.update_weights(publish(tmp_path, V1), V1)
        await running
        await until(lambda: backend._metrics.preemptions == 4)  # what vLLM says
        assert backend.state().preemptions == 2


@pytest.mark.parametrize("call", ["pause", "resume"])
async def test_a_pause_that_is_not_ended_stops_the_engine(tmp_path: Path, call: str) -> None:
    async with serving(tmp_path, BREAKS=call) as served:
        running = asyncio.ensure_future(served.backend.submit([1], MORE).result())
        await until(lambda: served.asked("generate"))
        with pytest.raises(EngineStopped, match=f"{call} is broken"):
            await served.backend.update_weights(publish(tmp_path, V1), V1)
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(running, 5)
        assert f"{call} is broken" in await served.backend.failure()
        assert served.backend.state().version == (V1 if call == "resume" else Version(0, 0))


async def test_a_request_that_comes_during_an_update_belongs_to_the_new_version(tmp_path: Path) -> None:
    async with serving(tmp_path, clear_cache=False, OLD="1", SLOW="load_published") as served:
        update = asyncio.ensure_future(served.backend.update_weights(publish(tmp_path, V1), V1))
        await until(lambda: served.asked("load_published"))
        found = await served.backend.submit([1], SHORT).result()
        await update
        assert found.version_spans == [(V1, 0, 2)]
        assert [asked["cache_salt"] for asked in served.asked("generate")] == ["0-1"]


async def test_a_copy_of_the_model_that_cannot_fetch_a_version_keeps_it_from_all(tmp_path: Path) -> None:
    async with serving(tmp_path, replicas=2, BREAKS="await_published") as served:
        with pytest.raises(WeightsUnreachable, match="0-1"):
            await served.backend.update_weights(publish(tmp_path, V1), V1)
        assert not served.asked("pause")
        assert (await served.backend.submit([1], SHORT).result()).version_spans == [(Version(0, 0), 0, 2)]


async def test_a_version_that_never_comes_is_given_up_and_blocks_no_pause(tmp_path: Path) -> None:
    async with serving(tmp_path, FETCHES="0", read_timeout_s=1.0) as served:
        path = publish(tmp_path, V1)
        update = asyncio.create_task(served.backend.update_weights(path, V1))
        await until(lambda: served.asked("has_published"))
        assert not served.asked("pause")
        await served.backend.pause()
        await served.backend.resume()
        assert not update.done()
        with pytest.raises(WeightsUnreachable, match=str(path)):
            await asyncio.wait_for(update, 30)
        assert served.backend.state().version == Version(0, 0)


async def test_an_adapter_is_loaded_while_a_version_never_comes(tmp_path: Path) -> None:
    async with serving(tmp_path, adapters=True, FETCHES="0") as served:
        update = asyncio.create_task(served.backend.update_weights(publish(tmp_path, V1), V1))
        await until(lambda: served.asked("has_published"))
        await asyncio.wait_for(served.backend.load_adapter("named", publish_adapter(tmp_path / "named", V1)), 60)
        assert served.backend.state().adapters == ["named"]
        await asyncio.wait_for(served.backend.unload_adapter("named"), 60)
        assert not update.done()
        update.cancel()
