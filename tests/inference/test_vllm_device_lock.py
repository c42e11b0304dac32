"""vLLM (a stand-in for it) on a GPU shared with a trainer: paused while the trainer holds the device lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from headrace.transport.lock import DeviceLock
from tests.inference.vllm_serving import LONG, publish, serving, tokens_of


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def make_locks(directory: Path) -> tuple[DeviceLock, DeviceLock]:
    """Return the trainer's lock and vLLM's, which is held at the start."""
    trainer, own = DeviceLock(directory / "turns", trainer=True), DeviceLock(directory / "turns", trainer=False)
    assert own.try_acquire()
    return trainer, own


async def test_it_is_paused_for_the_trainer_and_continues_the_same_requests(tmp_path: Path) -> None:
    trainer, own = make_locks(tmp_path)
    async with serving(tmp_path, lock=own) as served:
        backend = served.backend
        streamed = backend.submit([1], LONG)
        await tokens_of(streamed, 5)
        await until(trainer.try_acquire)
        assert (backend.state().waits_for_trainer, backend.state().hand_overs) == (True, 1)
        assert served.asked("pause") == [{"route": "pause", "mode": "keep", "clear_cache": "false"}]
        assert "resume" not in served.routes()
        late = asyncio.ensure_future(backend.submit([2], SamplingParams(max_tokens=3)).result())
        trainer.release()
        assert len((await streamed.result()).token_ids) == 100
        assert len((await late).token_ids) == 3
        assert served.routes().count("resume") == 1 and not backend.state().waits_for_trainer


async def test_pause_resume_and_updates_do_not_resume_it_while_the_trainer_holds_the_lock(tmp_path: Path) -> None:
    trainer, own = make_locks(tmp_path)
    async with serving(tmp_path, lock=own) as served:
        backend = served.backend
        await until(trainer.try_acquire)
        await backend.pause()
        await backend.resume()
        await backend.update_weights(publish(tmp_path, Version(0, 1)), Version(0, 1))
        assert backend.state().version == Version(0, 1)
        assert "resume" not in served.routes()
        await backend.pause()
        trainer.release()
        await until(lambda: not backend.state().waits_for_trainer)
        assert "resume" not in served.routes() and backend.state().paused
        await backend.resume()
        assert served.routes().count("resume") == 1


async def test_it_fails_if_it_cannot_be_paused(tmp_path: Path) -> None:
    trainer, own = make_locks(tmp_path)
    async with serving(tmp_path, lock=own, BREAKS="pause") as served:
        trainer.try_acquire()
        async with asyncio.timeout(30):
            assert await served.backend.failure()
        await served.backend.close()
        assert trainer.try_acquire()


async def test_it_fails_if_the_lock_cannot_be_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, own = make_locks(tmp_path)

    def release() -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(own, "release", release)
    async with serving(tmp_path, lock=own) as served:
        trainer.try_acquire()
        async with asyncio.timeout(30):
            assert "no locks available" in await served.backend.failure()
