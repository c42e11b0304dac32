"""The engine on its own thread."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import EngineError, EngineStopped, InvalidRequest, RequestCancelled
from headrace.inference.embedded.thread import Courier, EngineThread
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.published import WeightsError
from headrace.rollout.version import Version
from tests.inference.plain_forward import assert_like_plain

LONG = SamplingParams(ignore_eos=True)


@pytest.fixture
def thread(model: Any) -> Iterator[EngineThread]:
    thread = EngineThread(Engine(model, max_model_len=128, max_running=4))
    yield thread
    thread.stop()


def test_requests_of_many_threads_are_all_answered(thread: EngineThread, model: Any) -> None:
    requests: list[Any] = []

    def ask(start: int) -> None:
        for i in range(5):
            requests.append(thread.submit([start, 5 + i], SamplingParams(max_tokens=4)))

    askers = [threading.Thread(target=ask, args=(start,)) for start in (10, 20, 30)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    for request in requests:
        request.future.result(timeout=30)
    thread.pause()  # the model is about to be used here
    for request in requests:
        assert_like_plain(request, model)


def test_an_idle_engine_wakes_for_the_next_request(thread: EngineThread) -> None:
    for _ in range(3):
        assert thread.submit([5], SamplingParams(max_tokens=2)).future.result(timeout=30)
        thread.pause()
        assert not thread.engine.has_work
        thread.resume()


def test_a_paused_engine_answers_only_after_resuming(thread: EngineThread) -> None:
    thread.pause()
    request = thread.submit([5, 6], SamplingParams(max_tokens=2))
    thread.pause()  # a second round through the thread: it had its chance
    assert not request.future.done()
    thread.resume()
    assert request.future.result(timeout=30).token_ids


def test_an_update_while_paused_takes_effect_on_waiting_requests(
    thread: EngineThread, make_model: Callable[[int], Any], publish: Callable[[Any, Version], Any]
) -> None:
    thread.pause()
    request = thread.submit([5, 6], SamplingParams(max_tokens=3))
    thread.update_weights(publish(make_model(1), Version(0, 1)), Version(0, 1))
    thread.resume()
    request.future.result(timeout=30)
    assert_like_plain(request, {Version(0, 1): make_model(1)})


def test_a_version_that_is_loaded_is_not_read_again(
    thread: EngineThread, make_model: Callable[[int], Any], publish: Callable[[Any, Version], Any]
) -> None:
    version = Version(0, 1)
    directory = publish(make_model(1), version)
    checksum = thread.update_weights(directory, version)
    (directory / "model.safetensors").unlink()
    assert thread.update_weights(directory, version) == checksum


def test_the_same_version_of_another_run_is_loaded(
    thread: EngineThread, make_model: Callable[[int], Any], publish: Callable[[Any, Version], Any]
) -> None:
    version = Version(0, 1)
    first = thread.update_weights(publish(make_model(1), version), version)
    assert thread.update_weights(publish(make_model(2), version), version) != first
    request = thread.submit([5, 6], SamplingParams(max_tokens=3))
    request.future.result(timeout=30)
    thread.pause()
    assert_like_plain(request, {version: make_model(2)})


def test_errors_come_back_to_the_caller(thread: EngineThread, tmp_path: Any) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        thread.submit([], SamplingParams())
    with pytest.raises(WeightsError):
        thread.update_weights(tmp_path, Version(0, 1))
    assert thread.submit([5], SamplingParams(max_tokens=1)).future.result(timeout=30)


def test_cancelling_ends_a_running_request(thread: EngineThread) -> None:
    thread.pause()
    request = thread.submit([5], LONG)
    thread.cancel(request)
    with pytest.raises(RequestCancelled):
        request.future.result(timeout=30)


def test_stopping_answers_what_is_in_flight(model: Any) -> None:
    thread = EngineThread(Engine(model, max_model_len=128, max_running=1))
    thread.pause()
    requests = [thread.submit([5], LONG) for _ in range(2)]
    thread.stop()
    for request in requests:
        with pytest.raises(EngineStopped):
            request.future.result(timeout=0)
    with pytest.raises(EngineStopped):
        thread.submit([5], LONG)


def test_a_failure_outside_any_request_ends_none_of_them_in_silence(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread.pause()
    request = thread.submit([5], LONG)
    with monkeypatch.context() as patch:
        patch.setattr(thread.engine, "_take_from_line", lambda: 1 / 0)
        thread.resume()
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            request.future.result(timeout=30)
    assert thread.submit([5], SamplingParams(max_tokens=1)).future.result(timeout=30)


async def test_results_and_errors_cross_to_the_event_loop(thread: EngineThread) -> None:
    courier = Courier(asyncio.get_running_loop())
    requests = [thread.submit([5], SamplingParams(max_tokens=1 + i % 3)) for i in range(20)]
    results = await asyncio.wait_for(asyncio.gather(*map(courier.expect, requests)), 30)
    assert [len(result.token_ids) for result in results] == [len(request.logprobs) for request in requests]
    thread.pause()
    request = thread.submit([5], LONG)
    thread.cancel(request)
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(courier.expect(request), 30)
