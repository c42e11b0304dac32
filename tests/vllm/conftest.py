"""A real vLLM, one for most tests since its start takes longest. `make test-vllm` says where it is."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from headrace.config.inference import InferenceConfig
from headrace.inference.vllm.backend import VllmBackend
from headrace.inference.vllm.start import start_vllm
from headrace.text.tokenizer import Tokenizer
from tests.inference.conftest import make_qwen3, publish, write_tokenizer  # noqa: F401 (a fixture)

VARIABLE = "HEADRACE_VLLM_PYTHON"
"""Names the interpreter of an environment with vLLM; without it these tests are not there."""
PYTHON = os.environ.get(VARIABLE, "")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]
LONGEST = 512

torch.set_num_threads(1)


def make_model(seed: int) -> Any:
    """Tiny, with heads of a size that vLLM's CPU attention has."""
    return make_qwen3(seed, head_dim=32, max_position_embeddings=LONGEST)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_model(0).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def settings(**more: Any) -> InferenceConfig:
    vllm = {"python": PYTHON, "env": {"OMP_NUM_THREADS": "1"}, **more.pop("vllm", {})}
    return InferenceConfig(engine="vllm", max_running=8, max_waiting=24, max_model_len=LONGEST, vllm=vllm, **more)


async def start(directory: Path, **more: Any) -> VllmBackend:
    tokenizer = Tokenizer(directory)
    config = settings(**more)
    return await start_vllm(config, directory, eos_token_id=tokenizer.eos_token_id, decode=tokenizer.decode)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def backend(model_directory: Path) -> AsyncIterator[VllmBackend]:
    """Shared: tests that change its weights leave it with a version that is newer than all before."""
    backend = await start(model_directory)
    yield backend
    await backend.close()
