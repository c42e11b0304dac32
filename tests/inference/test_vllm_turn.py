"""vLLM beside a trainer on one GPU, over its stand-in: paused for the trainer's turn, with its requests kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from headrace.transport.turns import Turn
from tests.inference.vllm_serving import LONG, publish, serving, tokens_of


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def turns(directory: Path) -> tuple[Turn, Turn]:
    """The trainer's, and vLLM's own, which is taken when it starts."""
    trainer, own = Turn(directory / "turns", trainer=True), Turn(directory / "turns", trainer=False)
    assert own.try_take()
    return trainer, own


async def test_it_is_paused_for_the_trainer_and_goes_on_with_the_same_requests(tmp_path: Path) -> None:
    trainer, own = turns(tmp_path)
    async with serving(tmp_path, turn=own) as served:
        backend = served.backend
        streamed = backend.submit([1], LONG)
        await tokens_of(streamed, 5)
        await until(trainer.try_take)
        assert (backend.state().stands_still, backend.state().hand_overs) == (True, 1)
        assert served.asked("pause") == [{"route": "pause", "mode": "keep", "clear_cache": "false"}]
        assert "resume" not in served.routes()
        late = asyncio.ensure_future(backend.submit([2], SamplingParams(max_tokens=3)).result())
        trainer.leave()
        assert len((await streamed.result()).token_ids) == 100
        assert len((await late).token_ids) == 3
        assert served.routes().count("resume") == 1 and not backend.state().stands_still


async def test_what_else_asks_for_a_pause_does_not_end_the_trainers_turn(tmp_path: Path) -> None:
    trainer, own = turns(tmp_path)
    async with serving(tmp_path, turn=own) as served:
        backend = served.backend
        await until(trainer.try_take)
        await backend.pause()
        await backend.resume()
        await backend.update_weights(publish(tmp_path, Version(0, 1)), Version(0, 1))
        assert backend.state().version == Version(0, 1)
        assert "resume" not in served.routes()
        await backend.pause()
        trainer.leave()
        await until(lambda: not backend.state().stands_still)
        assert "resume" not in served.routes() and backend.state().paused
        await backend.resume()
        assert served.routes().count("resume") == 1


async def test_one_that_refuses_to_stand_still_is_given_up(tmp_path: Path) -> None:
    trainer, own = turns(tmp_path)
    async with serving(tmp_path, turn=own, BREAKS="pause") as served:
        trainer.try_take()
        async with asyncio.timeout(30):
            assert "does not take turns with the trainer" in await served.backend.failure()
        await served.backend.close()
        assert trainer.try_take()


async def test_so_is_one_with_which_anything_else_goes_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, own = turns(tmp_path)

    def leave() -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(own, "leave", leave)
    async with serving(tmp_path, turn=own) as served:
        trainer.try_take()
        async with asyncio.timeout(30):
            assert "take turns with the trainer: no locks available" in await served.backend.failure()
