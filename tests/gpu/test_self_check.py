"""The self-check at load on a GPU: right engines with graphs and compiled layers, and engines with a fault."""

from typing import Any

import pytest
import torch
from benchmarks.inference.self_check import FAMILIES, FAULTS, make_sharp_model

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.projections import join_projections
from headrace.inference.embedded.self_check import UnsupportedModel, check_engine
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_model(family: str, dtype: torch.dtype) -> Any:
    """A model as it is loaded for an engine on a GPU."""
    model = make_sharp_model(family, 0, dtype).cuda()
    join_projections(model)
    return model


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_engines_of_every_family_are_accepted(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype)
    check_engine(
        Engine(model, max_model_len=128, max_running=4, compile=family in ("qwen2", "gemma 2", "qwen3, experts"))
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("phi 3", "hidden keys"),
        ("qwen3", "positions"),
        ("llama", "decode positions"),
        ("qwen2", "biases"),
        ("mistral", "window"),
        ("gemma 2", "soft-cap"),
        ("granite", "scaling"),
    ],
)
def test_engines_with_a_fault_are_refused(family: str, fault: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype)
    with FAULTS[fault](model), refused(UnsupportedModel, key="model", value=type(model).__name__):
        check_engine(Engine(model, max_model_len=128, max_running=4, compile=False, graphs=False))
