"""Which errors become a sentence, and that nothing unexpected is hidden."""

from __future__ import annotations

import errno
import sqlite3

import pytest
import torch

from headrace.cli.main import explain
from headrace.config.base import ConfigError
from headrace.launch.errors import BadRequest, LaunchError


def test_bad_input_ends_with_2_and_failure_with_1() -> None:
    assert explain(ConfigError("x")) == ("x", 2)
    assert explain(BadRequest("y")) == ("y", 2)
    assert explain(LaunchError("z")) == ("z", 1)


def test_a_gpu_out_of_memory_is_a_failure_with_the_keys_that_would_help() -> None:
    explanation = explain(torch.OutOfMemoryError("Tried to allocate 2.00 GiB"))
    assert explanation is not None
    assert explanation.exit_code == 1
    for words in ("Tried to allocate 2.00 GiB", "inference.kv_cache_gb", "trainer.optim.offload_state"):
        assert words in explanation.message


@pytest.mark.parametrize("error", [KeyError("a"), ValueError("b"), FileNotFoundError(errno.ENOENT, "no", "f")])
def test_what_nobody_expected_keeps_its_traceback(error: Exception) -> None:
    assert explain(error) is None


def test_a_full_disk_is_recognised_however_a_library_wraps_it() -> None:
    wrapped = RuntimeError("write failed")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/runs/a/batch")
    for error in (wrapped, sqlite3.OperationalError("database or disk is full"), OSError(errno.EDQUOT, "quota")):
        explanation = explain(error)
        assert explanation is not None
        assert explanation.message.startswith("no space left on device")
        assert explanation.exit_code == 1
    assert "/runs/a/batch" in (explain(wrapped) or ("",))[0]


def test_permission_denied_names_the_path() -> None:
    assert explain(PermissionError(errno.EACCES, "Permission denied", "/runs/x")) == ("Permission denied: /runs/x", 1)
