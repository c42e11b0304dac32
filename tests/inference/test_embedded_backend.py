"""The embedded engine behind the server, from an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from headrace.errors import BadInput
from headrace.inference.backend import (
    Backend,
    EngineError,
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
)
from headrace.inference.embedded.backend import EmbeddedBackend
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.messages import FROM_ENGINE, TO_ENGINE, Cancel, Error, Failed, Frames, frame
from headrace.inference.embedded.self_check import UnsupportedModel
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.reading import WeightsError, WeightsUnreachable
from headrace.rollout.version import Version
from tests.inference.serving import connect

LONG = SamplingParams(ignore_eos=True)
WAIT = 30.0


@pytest_asyncio.fixture
async def backend(model: Any) -> AsyncIterator[EmbeddedBackend]:
    backend: EmbeddedBackend = await connect(Engine(model, max_model_len=128, max_running=4))
    yield backend
    await backend.close()


async def test_it_reports_its_name_and_limits(backend: EmbeddedBackend) -> None:
    known: Backend = backend
    assert (known.name, known.max_model_len, known.vocab_size) == ("embedded", 128, 264)
    assert known.state().capacity == 4


async def test_results_and_errors_cross_to_the_event_loop(backend: EmbeddedBackend) -> None:
    lengths = [1 + i % 3 for i in range(20)]
    generations = [backend.submit([5], SamplingParams(max_tokens=length, ignore_eos=True)) for length in lengths]
    results = await asyncio.wait_for(asyncio.gather(*(each.result() for each in generations)), WAIT)
    assert [len(result.token_ids) for result in results] == lengths
    await backend.pause()
    generation = backend.submit([5], LONG)
    generation.cancel()
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(generation.result(), WAIT)
    with pytest.raises(InvalidRequest):
        backend.submit([], LONG)
    with pytest.raises(ModelNotFound):
        backend.submit([5], LONG, adapter="missing")


async def test_a_result_may_be_awaited_twice_and_cancelling_an_await_ends_nothing(backend: EmbeddedBackend) -> None:
    await backend.pause()
    generation = backend.submit([5], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(generation.result(), 0.01)
    await backend.resume()
    first = await asyncio.wait_for(generation.result(), WAIT)
    assert first == await generation.result()
    generation.cancel()  # which has ended
    await backend.pause()  # a round through the thread
    assert backend.state().finished == {"length": 1}


async def test_chunks_are_the_result_in_parts(backend: EmbeddedBackend) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    generations = [backend.submit([5 + n], params) for n in range(6)]  # two of them wait at first

    async def collect(generation: Any) -> None:
        pieces = [piece async for piece in generation.chunks()]
        result = await generation.result()
        assert all(piece.token_ids for piece in pieces)
        assert [token for piece in pieces for token in piece.token_ids] == result.token_ids
        assert [value for piece in pieces for value in piece.logprobs] == result.logprobs
        assert [top for piece in pieces for top in piece.top_logprobs or []] == result.top_logprobs
        assert len(pieces) > 1

    await asyncio.wait_for(asyncio.gather(*map(collect, generations)), WAIT)


async def test_chunks_of_a_finished_request_come_at_once(backend: EmbeddedBackend) -> None:
    generation = backend.submit([5], SamplingParams(max_tokens=4, ignore_eos=True))
    result = await asyncio.wait_for(generation.result(), WAIT)
    assert [piece.token_ids async for piece in generation.chunks()] == [result.token_ids]


async def test_chunks_end_with_the_error_of_their_request(backend: EmbeddedBackend) -> None:
    await backend.pause()
    generation = backend.submit([5], LONG)
    following = asyncio.create_task(anext(generation.chunks()))
    await asyncio.sleep(0)
    generation.cancel()
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(following, WAIT)


async def test_weights_and_pauses(
    backend: EmbeddedBackend,
    make_model: Callable[[int], Any],
    publish: Callable[[Any, Version], Path],
    tmp_path: Path,
) -> None:
    version = Version(0, 1)
    await backend.pause()
    assert backend.state().paused
    generation = backend.submit([5], SamplingParams(max_tokens=2, ignore_eos=True))
    await backend.update_weights(publish(make_model(1), version), version)
    await backend.resume()
    result = await asyncio.wait_for(generation.result(), WAIT)
    assert result.version_spans == [(version, 0, 2)]
    assert (backend.state().version, backend.state().paused) == (version, False)
    with pytest.raises(WeightsError):
        await backend.update_weights(tmp_path, Version(0, 2))
    with pytest.raises(ModelNotFound):
        await backend.unload_adapter("missing")


async def test_failure_returns_when_the_engine_dies(
    backend: EmbeddedBackend, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(**_: Any) -> None:
        raise torch.AcceleratorError("the device is lost")

    waiting = asyncio.create_task(backend.failure())
    await backend.pause()
    generations = [backend.submit([5], LONG) for _ in range(6)]
    monkeypatch.setattr(model, "forward", lose)
    with contextlib.suppress(EngineStopped):  # if it dies before it answers
        await backend.resume()
    assert "the device is lost" in await asyncio.wait_for(waiting, WAIT)
    for generation in generations:
        with pytest.raises(EngineStopped, match="the device is lost"):
            await asyncio.wait_for(generation.result(), WAIT)
    with pytest.raises(EngineStopped, match="the device is lost"):
        backend.submit([5], LONG)
    assert "the device is lost" in (backend.state().failure or "")


async def test_cancelling_a_wait_for_failure_does_not_fail_the_engine(backend: EmbeddedBackend) -> None:
    waiting = asyncio.create_task(backend.failure())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert backend.state().failure is None
    await backend.close()
    with pytest.raises(EngineStopped, match="shutting down"):
        backend.submit([5], LONG)


async def test_closing_answers_what_is_in_flight(backend: EmbeddedBackend) -> None:
    await backend.pause()
    generations = [backend.submit([5], LONG) for _ in range(6)]
    await backend.close()
    for generation in generations:
        with pytest.raises(EngineStopped, match="shutting down"):
            await asyncio.wait_for(generation.result(), WAIT)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnsupportedModel("has no window", key="model", value="dir", fix="Take another."), BadInput),
        (InvalidRequest("too long", key="token_ids", value=3), InvalidRequest),
        (WeightsUnreachable("the trainer is gone"), WeightsUnreachable),
        (EngineStopped("over"), EngineStopped),
        (ModelNotFound("adapter"), ModelNotFound),
        (KeyError("of a library"), EngineError),
    ],
)
def test_an_error_arrives_as_what_the_server_tells_apart(error: Exception, kind: type[Exception]) -> None:
    [message] = Frames(FROM_ENGINE).feed(frame(Failed(1, Error.of(error))))
    arrived = message.error.exception()
    assert type(arrived) is kind
    if isinstance(error, BadInput):
        assert str(arrived) == str(error)
    else:
        assert str(error) in str(arrived)


def test_frames_may_arrive_in_any_pieces() -> None:
    sent = [Cancel(number) for number in range(40)]
    content = frame(*sent[:1]) + frame(*sent[1:30]) + frame(*sent[30:])
    for size in (1, 3, 64, len(content)):
        frames = Frames(TO_ENGINE)
        pieces = [content[start : start + size] for start in range(0, len(content), size)]
        assert [message for piece in pieces for message in frames.feed(piece)] == sent
