"""The backend over a stand-in for vLLM: what it asks for and what it makes of answers, deaths and failures.

`tests/vllm` has the same with the real one.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.inference.backend import (
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
)
from headrace.inference.client.http import HttpClient
from headrace.inference.schema import SamplingParams
from headrace.inference.vllm.process import ChildDirectory, VllmFailed, VllmProcess
from headrace.inference.weights.reading import WeightsError
from headrace.rollout.version import Version
from headrace.transport.adapter import Adapter, AdapterConfig, Matrices, write_adapter
from headrace.transport.weights import WeightStore
from tests.inference.vllm_serving import LONG, publish, serving, stand_in, tokens_of


@pytest.mark.parametrize("old", ["0", "1"])
async def test_requests_updates_and_refusals(tmp_path: Path, old: str) -> None:
    async with serving(tmp_path, OLD=old) as served:
        backend = served.backend
        ended = await backend.submit([1, 2], SamplingParams(max_tokens=50, logprobs=1, seed=-1)).result()
        assert ended.token_ids == [10, 11, 12, 13, 14, 15]
        assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
        assert ended.top_logprobs == [[(token, -0.7)] for token in ended.token_ids]
        assert ended.version_spans == [(Version(0, 0), 0, 6)]
        [asked] = served.asked("generate")
        assert asked["sampling_params"]["stop_token_ids"] == [15] and asked["sampling_params"]["ignore_eos"]
        assert asked["sampling_params"]["seed"] == 2**63 - 1

        streamed, whole = backend.submit([1], LONG), backend.submit([1], LONG)
        result = asyncio.ensure_future(whole.result())
        pieces = asyncio.ensure_future(tokens_of(streamed, 100))
        await tokens_of(backend.submit([2], LONG), 20)
        version = Version(3, 7)
        checksum = await backend.update_weights(publish(tmp_path, version), version)
        again = await backend.update_weights(tmp_path / "weights" / "v-3-7", version)
        assert again == checksum and served.routes().count("load_published") == 1
        late = await backend.submit([1], SamplingParams(max_tokens=3)).result()
        assert late.version_spans == [(version, 0, 3)]
        await pieces
        for found in (await result, await streamed.result()):
            [first, second] = found.version_spans
            assert (first[0], second[0]) == (Version(0, 0), version)
            assert (first[1], first[2], second[2]) == (0, second[1], 100) and 0 < second[1] < 100
        assert (await streamed.result()).cached_tokens == 4
        assert served.asked("pause") == [{"route": "pause", "mode": "keep", "clear_cache": "true"}]
        assert served.routes().count("resume") == 1

        for path, wrong, message in [
            (tmp_path / "nowhere", version, "COMPLETE"),
            (tmp_path / "weights" / "v-3-7", Version(3, 8), "3-7"),
        ]:
            with pytest.raises(WeightsError, match=message):
                await backend.update_weights(path, wrong)
        assert backend.state().version == version


async def test_more_than_may_wait_are_turned_away_and_the_cancelled_make_room(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        backend = served.backend
        asked = [backend.submit([1], LONG) for _ in range(6)]
        with pytest.raises(EngineOverloaded, match=r"\b6\b"):
            backend.submit([1], LONG)
        results = [asyncio.ensure_future(generation.result()) for generation in asked[1:]]
        asked[0].cancel()
        with pytest.raises(RequestCancelled):
            await asked[0].result()
        state = backend.state()
        assert (state.running + state.waiting, state.kv_usage, state.preemptions) == (5, 0.25, 2)
        assert state.finished == {"cancelled": 3} and state.capacity == 2
        urgent = backend.submit([2], LONG, urgent=True, session="a", cache_salt="one@/two")
        await asyncio.gather(*results, urgent.result())
        last = served.asked("generate")[-1]
        assert (last["priority"], last["rank"]) == (-1, None)
        assert len(last["cache_salt"]) == 32


async def test_copies_of_the_model_keep_their_sessions_and_a_kept_cache_its_version(tmp_path: Path) -> None:
    async with serving(tmp_path, replicas=4, clear_cache=False) as served:
        backend = served.backend
        short = SamplingParams(max_tokens=1)
        for session in ("a", "a", "b", "c", "a"):
            await backend.submit([1], short, session=session).result()
        ranks = [asked["rank"] for asked in served.asked("generate")]
        assert ranks[0] == ranks[1] == ranks[4] and set(ranks) <= {"0", "1", "2", "3"} and len(set(ranks)) > 1
        await backend.update_weights(publish(tmp_path, Version(0, 5)), Version(0, 5))
        await backend.submit([1], short).result()
        salts = [asked["cache_salt"] for asked in served.asked("generate")]
        assert salts == ["0-0"] * 5 + ["0-5"]
        assert served.asked("pause")[0]["clear_cache"] == "false"


async def test_a_vllm_that_reports_what_was_left_gives_no_logprobs_of_that(tmp_path: Path) -> None:
    async with serving(tmp_path, TRUNCATES="1") as served:
        with pytest.raises(InvalidRequest, match="logprobs"):
            served.backend.submit([1], SamplingParams(top_k=3, logprobs=0))
        without = await served.backend.submit([1], SamplingParams(top_k=3, max_tokens=2)).result()
        assert without.token_ids == [10, 11] and all(logprob != logprob for logprob in without.logprobs)
        assert "logprobs" not in served.asked("generate")[0]["sampling_params"]
        assert (await served.backend.submit([1], SamplingParams(max_tokens=2, logprobs=0)).result()).logprobs == [
            -0.7,
            -0.7,
        ]


async def test_workers_that_may_disagree_end_the_engine(tmp_path: Path) -> None:
    async with serving(tmp_path, BREAKS="load_published") as served:
        backend = served.backend
        running = asyncio.ensure_future(backend.submit([1], LONG).result())
        await tokens_of(backend.submit([1], LONG), 3)
        with pytest.raises(EngineStopped, match="load_published is broken"):
            await backend.update_weights(publish(tmp_path, Version(0, 1)), Version(0, 1))
        with pytest.raises(EngineStopped):
            await running
        assert "two versions" in await backend.failure()
        with pytest.raises(EngineStopped):
            backend.submit([1], LONG)


async def test_a_killed_child_ends_its_requests_with_its_log_tail(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        running = served.backend.submit([1], LONG)
        streamed = served.backend.submit([1], LONG)
        await tokens_of(streamed, 3)
        waiting = asyncio.ensure_future(running.result())
        await asyncio.sleep(0.05)
        os.kill(served.process.pid, signal.SIGKILL)
        reason = await served.backend.failure()
        assert reason.startswith("vLLM was ended by SIGKILL. The end of its log:")
        assert "--enable-scale-out" in reason
        for generation in (running, streamed):
            with pytest.raises(EngineStopped, match="SIGKILL"):
                await generation.result()
        with pytest.raises(EngineStopped):
            await waiting
        assert served.backend.state().failure == reason


async def test_a_failed_start_has_the_log_tail(tmp_path: Path) -> None:
    async with stand_in(tmp_path / "requests", FAILS="1") as process:
        with pytest.raises(VllmFailed, match=r"(?s)3.*a line of its log"):
            await process.ready(HttpClient(), 30)


async def test_an_interpreter_that_is_not_there_is_named() -> None:
    room = ChildDirectory()
    with pytest.raises(VllmFailed, match="/no/such/python"):
        await VllmProcess.start(room, Path("/no/such/python"), [], {})
    assert not room.directory.exists()


async def test_adapters_by_name_and_by_version(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = Adapter(
        AdapterConfig(r=4, lora_alpha=4, target_modules=["q_proj"]),
        {"model.q_proj": Matrices(torch.ones(4, 2), torch.ones(3, 4))},
    )
    async with serving(tmp_path, adapters=True) as served:
        backend = served.backend
        store = WeightStore(tmp_path / "weights")
        store.publish(Version(0, 1), lambda draft: write_adapter(draft, found))
        directory = store.path(Version(0, 1))
        old = backend.submit([1], LONG)
        await tokens_of(old, 3)
        await backend.update_weights(directory, Version(0, 1))
        new = await backend.submit([1], SamplingParams(max_tokens=2)).result()
        assert new.version_spans == [(Version(0, 1), 0, 2)]
        assert (await old.result()).version_spans == [(Version(0, 0), 0, 100)]
        assert [asked["model"] for asked in served.asked("generate")] == ["policy", "policy@0-1#0"]
        assert "pause" not in served.routes()

        await backend.load_adapter("mine", directory)
        await backend.load_adapter("mine", directory)
        assert backend.state().adapters == ["mine"]
        assert [asked["lora_name"] for asked in served.asked("unload_adapter")] == ["mine#1"]
        await backend.submit([1], SamplingParams(max_tokens=2), adapter="mine").result()
        assert served.asked("generate")[-1]["model"] == "mine#2"
        loading = backend.load_adapter("other", directory)  # both must wait for it
        unloading = (backend.unload_adapter("mine") for _ in range(2))
        _, first, second = await asyncio.gather(loading, *unloading, return_exceptions=True)
        assert first is None and isinstance(second, ModelNotFound)
        assert backend.state().adapters == ["other"]
        with pytest.raises(ModelNotFound):
            backend.submit([1], LONG, adapter="mine")
        store.publish(Version(0, 2), lambda draft: write_adapter(draft, found))
        os.truncate(store.path(Version(0, 2)) / "adapter_model.safetensors", 40)
        with pytest.raises(WeightsError, match="damaged"):
            await backend.update_weights(store.path(Version(0, 2)), Version(0, 2))
        assert backend.state().version == Version(0, 1)
    assert not list((tmp_path / "copies").glob("mine*"))


ORPHAN = """
import asyncio, sys
from pathlib import Path
from tests.inference.vllm_serving import stand_in
from headrace.inference.client.http import HttpClient

async def main():
    async with stand_in(Path(sys.argv[1])) as process:
        await process.ready(HttpClient(), 30)
        print(process.pid, process.url.removeprefix("unix:"), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_child_ends_when_we_are_killed(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ours = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path / "requests")], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert ours.stdout is not None
    pid, socket = ours.stdout.readline().split()
    ours.kill()
    ours.wait()
    deadline = time.monotonic() + 20
    while is_running(int(pid)) or Path(socket).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(shown.strip()) and not shown.startswith("Z")
