"""Families of models on vLLM: tokens have the logprobs of a plain forward, before and after new weights."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.rollout.version import Version
from headrace.tools.models import FAMILIES as SUPPORT
from headrace.transport.weights import WeightStore
from tests.end_to_end.runs import REPOSITORY
from tests.inference.plain_forward import plain_logprobs
from tests.models.families import FAMILIES, make_model
from tests.vllm.conftest import PYTHON

EACH_TIME = ("llama", "mistral", "qwen3_moe")
"""Scaled rotary positions, a sliding window, experts; the other families are tested with `full`."""
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
"""Heads of a size that vLLM's CPU attention has."""
UNSURE = {**SIZES, "initializer_range": 0.02}
"""A spread of weights with which models that scale their tied embeddings are not certain of each token."""
OTHER_SIZES: dict[str, dict[str, Any]] = {
    **{"gemma2": UNSURE, "gemma3_text": UNSURE, "gemma4_text": {**UNSURE, "global_head_dim": 32}},
    "deepseek_v3": {"hidden_size": 128},  # its heads have sizes of their own
}
TOLERANCE = 1e-4
"""Weights of this spread give logits of order 100, whose float32 rounding is 1e-5; ten layers' worth of sums."""
PROMPTS = [list(range(n, n + 20)) for n in range(4)]
OTHERS = tuple(family for family in FAMILIES if not (family in EACH_TIME or SUPPORT[family].vllm.startswith("no:")))


def sample(families: Sequence[str], root: Path) -> dict[str, dict[str, Any]]:
    """Return what vLLM samples from each family's models, or its error."""
    for family in families:
        first, second = (make_model(family, seed, **OTHER_SIZES.get(family, SIZES)) for seed in range(2))
        first.save_pretrained(root / family / "model")
        WeightStore(root / family / "weights").publish(Version(0, 1), second.save_pretrained)
    environment = {
        **os.environ,
        **{"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)]), "HF_HUB_OFFLINE": "1"},
        **{"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"},
    }
    command = [PYTHON, "-m", "tests.vllm.families_program", *(str(root / family) for family in families)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"directory"')]
    assert len(lines) == len(families), (done.stdout + done.stderr)[-5000:]
    return {Path(line["directory"]).name: line for line in lines}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("families", [EACH_TIME, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["three", "others"])
def test_families_are_sampled_and_take_new_weights(families: Sequence[str], tmp_path: Path) -> None:
    sampled = sample(families, tmp_path)
    for family in families:
        assert "error" not in sampled[family], (family, sampled[family]["error"])
        for seed, results in enumerate((sampled[family]["before"], sampled[family]["after"])):
            model = make_model(family, seed, **OTHER_SIZES.get(family, SIZES))
            for prompt, result in zip(PROMPTS, results, strict=True):
                plain = plain_logprobs(model, prompt + result["tokens"])[len(prompt) - 1 :]
                found = torch.tensor(result["logprobs"])
                torch.testing.assert_close(found, plain, atol=TOLERANCE, rtol=0, msg=lambda m: f"{family}, {seed}: {m}")  # noqa: B023
