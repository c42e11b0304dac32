"""Staging of new weights: on the GPU if they fit, and else on the host."""

from collections.abc import Callable

import pytest
import torch

from headrace.inference.weights.buffers import stage

GPU, CPU = torch.device("cuda"), torch.device("cpu")
NO_HANDLE = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A GPU of which 100 bytes are free; here is how often torch gave back what it had kept."""
    times: list[None] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: times.append(None))
    return times


def failing_on_the_gpu(error: Exception) -> Callable[[torch.device], torch.device]:
    def make(where: torch.device) -> torch.device:
        if where == GPU:
            raise error
        return where

    return make


def test_a_gpu_with_twice_the_room_is_used(emptied: list[None]) -> None:
    assert stage(GPU, 49, lambda where: where) == GPU
    assert stage(GPU, 50, lambda where: where) == CPU
    assert stage(CPU, 1, lambda where: where) == CPU
    assert not emptied


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), NO_HANDLE])
def test_out_of_memory_on_the_gpu_falls_back_to_the_host(error: Exception, emptied: list[None]) -> None:
    assert stage(GPU, 10, failing_on_the_gpu(error)) == CPU
    assert len(emptied) == 1


def test_other_errors_are_raised(emptied: list[None]) -> None:
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        stage(GPU, 10, failing_on_the_gpu(RuntimeError("an illegal memory access")))
