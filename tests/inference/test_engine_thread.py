"""The engine on its own thread."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from headrace.inference.backend import EngineError, EngineStopped, InvalidRequest, RequestCancelled
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.published import PublishedWeights
from headrace.inference.weights.reading import WeightsError
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


@pytest.fixture
def dying(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> EngineThread:
    """A thread with requests in flight, whose device is lost at its next step."""

    def lose(**_: Any) -> None:
        raise torch.AcceleratorError("the device is lost")

    thread.pause()
    monkeypatch.setattr(thread.engine.model, "forward", lose)
    return thread


def test_a_lost_device_ends_the_engine_and_all_in_flight(dying: EngineThread) -> None:
    requests = [dying.submit([5 + n], LONG, urgent=n == 3) for n in range(7)]  # more than run at once
    assert (dying.failure.done(), dying.state().failure) == (False, None)
    dying.resume()
    why = dying.failure.result(timeout=30)
    assert why is not None and why.endswith("AcceleratorError: the device is lost")
    for request in requests:
        with pytest.raises(EngineStopped, match="the device is lost"):
            request.future.result(timeout=30)
    state = dying.state()
    assert (state.failure, state.running, state.waiting) == (why, 0, 0)


def test_tokens_of_a_step_that_a_call_finishes_are_sent_before_the_next_step(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    step = thread.engine.step
    monkeypatch.setattr(thread.engine, "step", lambda: (events.append("step"), step()))
    thread.after_step = lambda idle: events.append("sent")
    request = thread.submit([5], SamplingParams(max_tokens=20, ignore_eos=True))
    thread._call(lambda: events.append("call"))
    request.future.result(timeout=30)
    assert events[events.index("call") + 1] == "sent"


def test_an_update_that_breaks_off_ends_the_engine(
    make_model: Callable[[int], Any], publish: Callable[[Any, Version], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(_: PublishedWeights, parameters: Any, copy: Any) -> None:
        parameters["model.embed_tokens.weight"].zero_()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PublishedWeights, "install", break_off)
    version = Version(0, 1)
    thread = EngineThread(Engine(make_model(0), max_model_len=64))
    with pytest.raises(EngineError, match=r"0-1.*out of memory"):
        thread.update_weights(publish(make_model(1), version), version)
    assert "_PartialInstall" in thread.failure.result(timeout=30)
    with pytest.raises(EngineStopped, match="0-1"):
        thread.submit([5], LONG)


def test_requests_end_also_if_an_update_breaks_off_after_the_engine(
    make_model: Callable[[int], Any], publish: Callable[[Any, Version], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("the device is lost")

    def fail_with_an_update_in_the_queue(**_: Any) -> None:
        updates.append(pool.submit(thread.update_weights, directory, version))
        while not thread._calls:
            time.sleep(0.001)
        fail()

    monkeypatch.setattr(PublishedWeights, "install", fail)
    version, updates = Version(0, 1), list[Future[str]]()
    directory = publish(make_model(1), version)
    thread = EngineThread(Engine(make_model(0), max_model_len=64))
    monkeypatch.setattr(thread.engine.model, "forward", fail_with_an_update_in_the_queue)
    with ThreadPoolExecutor() as pool:
        with pytest.raises(EngineStopped, match="the device is lost"):
            thread.submit([5], LONG).future.result(timeout=30)
        with pytest.raises(EngineError, match="0-1"):
            updates[0].result(timeout=30)


def test_a_dead_engine_refuses_everything_with_the_reason(
    dying: EngineThread, make_model: Callable[[int], Any], publish: Callable[[Any, Version], Any]
) -> None:
    request = dying.submit([5], LONG)
    dying.resume()
    dying.failure.result(timeout=30)
    version = Version(0, 1)
    directory = publish(make_model(1), version)
    refused: list[Callable[[], Any]] = [
        lambda: dying.submit([5], LONG),
        dying.pause,
        dying.resume,
        lambda: dying.update_weights(directory, version),
    ]
    for call in refused:
        with pytest.raises(EngineStopped, match="the device is lost"):
            call()
    dying.cancel(request)  # which has ended
    dying.stop()


def test_an_error_of_the_engine_itself_ends_it(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    thread.pause()
    request = thread.submit([5], LONG)
    monkeypatch.setattr(thread.engine.scheduler, "schedule", lambda _: 1 / 0)
    thread.resume()
    with pytest.raises(EngineStopped, match="ZeroDivisionError"):
        request.future.result(timeout=30)
    with pytest.raises(EngineStopped, match="ZeroDivisionError"):
        thread.submit([5], LONG)


def test_calls_that_wait_when_the_engine_ends_are_answered(thread: EngineThread) -> None:
    with ThreadPoolExecutor(8) as callers:
        calls = [callers.submit(thread.pause if n % 2 else thread.resume) for n in range(40)]
        thread.stop()
        errors = [call.exception(timeout=30) for call in calls]
    assert all(error is None or isinstance(error, EngineStopped) for error in errors)


def test_a_stopped_engine_has_not_failed(thread: EngineThread) -> None:
    thread.stop()
    assert (thread.failure.done(), thread.state().failure) == (False, None)


def test_tokens_are_announced_as_they_come(thread: EngineThread) -> None:
    seen: list[int] = []
    thread.pause()
    request = thread.submit([5], SamplingParams(max_tokens=4, ignore_eos=True))
    request.on_tokens = lambda: seen.append(len(request.sampled_since(0).token_ids))
    thread.resume()
    request.future.result(timeout=30)
    assert seen == [1, 2, 3]  # the last one comes with the result
