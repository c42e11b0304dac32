"""The thread that owns an engine: it steps while there is work, and sleeps otherwise.

On a device that the trainer shares it also hands the device lock over between two steps. While the trainer holds the
lock, the thread accepts requests, drops cancelled ones and runs calls, e.g. to install weights. The engine holds the
lock whenever the trainer does not request it, even without requests to compute: so every hand-over happens here, and
the KV cache is released before the trainer's step begins if the trainer is short of memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from headrace.inference.backend import SHUTTING_DOWN, EngineError, EngineState, EngineStopped
from headrace.inference.embedded.cuda.kv_storage import OutOfDeviceMemory
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import Request
from headrace.inference.weights.published import PublishedWeights
from headrace.inference.weights.reading import READ_TIMEOUT_S, DirectoryReader, WeightsError, read_checked_marker
from headrace.rollout.version import Version
from headrace.transport.lock import POLL_S, DeviceLock

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_NOTICE_S = 2.0
"""Time without memory for the KV cache after which a warning is logged; then at doubling intervals."""
RESTORE_TIMEOUT_S = 60.0
"""Time after which the engine fails; when it is restarted, it sizes its cache by what is free."""


class EngineDeviceLock:
    """Hands the device of `engine` to the trainer and back; `lock` is held and the KV cache allocated at the start.

    Only the engine's thread may call methods; other threads may read the counters.
    """

    def __init__(self, engine: Engine, lock: DeviceLock) -> None:
        self.may_compute = False
        """The result of the last `poll`."""
        self.hand_overs = 0
        self.cache_releases = 0
        """Hand-overs for which the KV cache was released."""
        self._engine, self._lock = engine, lock
        self._is_cache_released = False
        if engine.runner.cache_bytes:
            lock.mark_cache_resident()
        self._short_since: float | None = None
        """When restoring the cache first failed since the lock was acquired."""
        self._has_warned = False
        self._next_notice = FIRST_NOTICE_S

    @property
    def is_held(self) -> bool:
        """Whether the engine has the lock; otherwise the trainer computes or is about to."""
        return self._lock.is_held

    def poll(self) -> bool:
        """Between two steps: release or re-acquire the lock as needed, and return whether a step may be computed."""
        if not self._lock.is_held:
            self._lock.try_acquire()
        elif self._lock.is_requested_by_trainer:
            self._hand_over()
        self.may_compute = self._lock.is_held and self._ensure_cache()
        return self.may_compute

    def close(self) -> None:
        self._lock.close()

    def _hand_over(self) -> None:
        """Give the device lock to the trainer, after freeing the KV cache if the trainer lacks memory."""
        self._engine.finish_step()
        requested = self._lock.requested_memory
        # `cache_bytes` is 0 on a device other than a GPU.
        is_freeable = self._engine.runner.cache_bytes > 0
        if is_freeable and (requested is None or free_bytes(self._engine.device) < requested):
            self._release_cache()
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        self.hand_overs += 1
        self._short_since = None
        self._lock.release()

    def _release_cache(self) -> None:
        released = self._engine.release_cache()
        self._lock.mark_cache_released()
        torch.cuda.empty_cache()  # activations of long prefills
        if not released:  # still released from an earlier hand-over
            return
        if not self.cache_releases:
            size = released / 2**30
            log.info("releasing the KV cache (%.1f GiB) during training steps: the trainer is short of memory", size)
        self.cache_releases += 1
        self._is_cache_released = True

    def _ensure_cache(self) -> bool:
        """Restore a released cache once there is work, and return whether the cache is usable."""
        if not self._is_cache_released:
            return True
        if not self._engine.has_work:
            return False
        try:
            self._engine.runner.restore()
        except OutOfDeviceMemory as error:
            self._check_timeout(error)
            return False
        if self._has_warned:
            log.info("the KV cache is restored")
        self._is_cache_released, self._short_since, self._has_warned = False, None, False
        self._lock.mark_cache_resident()
        return True

    def _check_timeout(self, error: OutOfDeviceMemory) -> None:
        """Raise `EngineError` if the cache cannot be restored for too long; until then log it at growing intervals."""
        now = time.monotonic()
        if self._short_since is None:
            self._short_since, self._next_notice = now, FIRST_NOTICE_S
        waited = now - self._short_since
        if waited > RESTORE_TIMEOUT_S:
            raise EngineError(
                f"the KV cache could not be restored beside the trainer for {waited:.0f} s ({error}). "
                "Set inference.kv_cache_gb to less if this happens again."
            ) from error
        if waited > self._next_notice:
            log.warning("the KV cache cannot be restored after the trainer's step: %s; retrying", error)
            self._next_notice, self._has_warned = 2 * waited, True


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU."""
    return torch.cuda.mem_get_info(device)[0]


class _PartialInstall(EngineError):
    """The model has tensors of two versions: nothing more may be sampled from it."""


class EngineThread:
    """An engine on a thread of its own; every method may be called from any thread.

    With a `lock` the engine shares its device with the trainer, and steps only while it holds the lock. Files are read
    for at most `read_timeout_s`.
    """

    def __init__(self, engine: Engine, lock: DeviceLock | None = None, read_timeout_s: float = READ_TIMEOUT_S) -> None:
        self.engine = engine
        self._reader = DirectoryReader(read_timeout_s)
        self.after_step: Callable[[bool], None] = lambda idle: None
        """Called on the thread after each step and after calls, which may finish one; with whether the engine has
        nothing more to do."""
        self._device_lock = None if lock is None else EngineDeviceLock(engine, lock)
        self.failure: Future[str] = Future()
        """The error that ended the engine, once it has failed."""
        self._wake = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._updating = threading.Lock()
        self._loaded: tuple[Version, str] | None = None
        """The last installed version, and its checksum."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, *arguments: Any, **options: Any) -> Request:
        """Call `Engine.submit`: append a request to the waiting queue."""
        with self._wake:
            self._refuse_if_stopping()
            request = self.engine.submit(*arguments, **options)
            self._wake.notify()
        return request

    def cancel(self, request: Request) -> None:
        with self._wake:
            self.engine.cancel(request)
            self._wake.notify()

    def state(self) -> EngineState:
        state = self.engine.state()
        state.failure = self.failure.result() if self.failure.done() else None
        if self._device_lock is not None:
            state.waits_for_trainer = not self._device_lock.is_held
            state.hand_overs, state.cache_releases = self._device_lock.hand_overs, self._device_lock.cache_releases
        return state

    def pause(self) -> None:
        """Pause all requests after the current step; returns once they are paused."""
        self._call(lambda: setattr(self.engine, "paused", True))

    def resume(self) -> None:
        self._call(lambda: setattr(self.engine, "paused", False))

    def update_weights(self, directory: Path, version: Version) -> str:
        """Install a published version before the next step, and return its checksum.

        The files are read while sampling continues. Idempotent: a version that is installed already is not read again.
        """
        deadline = time.monotonic() + self._reader.timeout_s
        if not self._updating.acquire(timeout=self._reader.timeout_s):  # behind updates that are not read either
            raise self._reader.unreachable(directory)
        try:
            self._refuse_if_stopping()

            def read_new() -> PublishedWeights | str:
                """Return the weights, or only their checksum if they are installed already."""
                marker = read_checked_marker(directory, version)
                is_loaded = self._loaded == (version, marker.checksum)
                return marker.checksum if is_loaded else self.engine.read(directory, version)

            published = self._reader.read(directory, read_new, deadline)
            if isinstance(published, str):
                return published
            try:
                self._call(lambda: self._install(published))
            finally:
                published.release()
            self._loaded = (published.version, published.checksum)
            return published.checksum
        finally:
            self._updating.release()

    def load_adapter(self, name: str, directory: Path) -> None:
        """Serve an adapter under this name, replacing one that has it."""
        adapter = self._reader.read(directory, lambda: self.engine.adapters.read(name, directory))
        self._call(lambda: self.engine.adapters.add(adapter))

    def unload_adapter(self, name: str) -> None:
        self._call(lambda: self.engine.adapters.remove(name))

    def stop(self) -> None:
        """Stop the thread; requests in flight get `EngineStopped`, and a transfer of weights is aborted."""
        self.engine.link.close()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _install(self, published: PublishedWeights) -> None:
        """Install weights, on the engine's thread. Raises `_PartialInstall` if only some tensors were copied."""
        try:
            self.engine.install(published)
        except WeightsError:
            raise  # nothing was changed
        except Exception as error:
            raise _PartialInstall(f"weights {published.version} are installed only in part: {error}") from error

    def _call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps, and return its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, _PartialInstall):
                    raise

        with self._wake:
            self._refuse_if_stopping()
            self._calls.append(run)
            self._wake.notify()
        return future.result()

    def _refuse_if_stopping(self) -> None:
        if self.failure.done():
            raise EngineStopped(self.failure.result())
        if self._stopping:
            raise EngineStopped(SHUTTING_DOWN)

    def _run(self) -> None:
        """Run calls and steps until `stop` or a failure, which ends all requests."""
        failure: str | None = None
        try:
            while not self._stopping:
                if self._calls:
                    while self._calls:
                        self._calls.popleft()()
                    self.after_step(False)
                if self._device_lock is None or self._device_lock.poll():
                    self.engine.step()
                else:
                    self.engine.drop_cancelled()
                self.after_step(not self._has_something_to_do())
                with self._wake:
                    self._wake.wait_for(self._has_something_to_do, None if self._device_lock is None else POLL_S)
        except Exception as error:  # every caller would wait forever if the thread ended here
            log.exception("the engine failed; all its requests end with an error")
            failure = f"the engine died: {type(error).__name__}: {error}"
        with self._wake:  # requests and calls are refused from here on
            self._stopping = True
            if failure is not None:
                self.failure.set_result(failure)
        # A failed engine keeps its memory, and so the lock, until its process ends.
        if self._device_lock is not None and failure is None:
            self._device_lock.close()
        while self._calls:
            with suppress(_PartialInstall):  # the engine has ended already
                self._calls.popleft()()
        self.engine.fail_all(EngineStopped(failure or SHUTTING_DOWN))
        self.after_step(True)

    def _has_something_to_do(self) -> bool:
        may_compute = self._device_lock is None or self._device_lock.may_compute
        return bool(self._stopping or self._calls or (may_compute and self.engine.has_work))
