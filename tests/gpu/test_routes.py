"""Routes on a GPU: recorded by CUDA graphs and compiled layers, and replayed by a trainer in bfloat16."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.inference.self_check import make_sharp_model

from headrace.inference.embedded.engine import Engine
from headrace.rollout.types import ROUTES
from headrace.trainer.model import PackedModel
from tests.inference.plain_forward import random_prompt
from tests.models.test_routes import own_routes, sampled, scores

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_engine(dtype: torch.dtype, **options: Any) -> Engine:
    from headrace.inference.embedded.cuda.runner import CudaRunner

    model = make_sharp_model("qwen3, experts", 0, dtype).cuda()
    engine = Engine(model, max_model_len=128, max_running=8, routed_experts=True, **options)
    assert isinstance(engine.runner, CudaRunner)  # and not the one that it falls back to
    return engine


@pytest.mark.parametrize(
    "options", [{}, {"compile": False}, {"graphs": False}], ids=["all", "not compiled", "no graphs"]
)
def test_graphs_and_compiled_layers_record_the_experts_of_the_plain_model(options: dict[str, Any]) -> None:
    engine = make_engine(torch.float32, **options)
    text = random_prompt(random.Random(0), 60)
    samples = sampled(engine, [text, text[:20], text[:20]]) + sampled(engine, [[*text[:40], 5]])
    plain = make_sharp_model("qwen3, experts", 0, torch.float32)
    different = total = 0
    for sample in samples:
        rows = sample.streams[ROUTES][:-1] != own_routes(plain, sample.token_ids.tolist())[:-1]
        different, total = different + int(rows.any(1).sum()), total + len(rows)
    assert different <= 0.02 * total  # of almost equal experts


def test_the_trainer_is_closer_to_an_engine_in_bfloat16_with_replayed_experts(tmp_path: Path) -> None:
    engine = make_engine(torch.bfloat16)
    rng = random.Random(0)
    samples = sampled(engine, [random_prompt(rng, 40) for _ in range(32)], tokens=32)
    engine.model.save_pretrained(tmp_path)
    mean = {}
    for mode in ("record", "replay"):
        model = PackedModel(tmp_path, dtype=torch.bfloat16, router_replay=mode)  # type: ignore[arg-type]
        found, engines = scores(model, samples)
        x = (found.detach().cpu() - engines).double()
        mean[mode] = float((x.exp() - x - 1).mean())
        changed = [float(each.changed / each.recorded) for each in model.routing.statistics.values()]
        print(f"{mode}: mismatch {mean[mode]:.3g}, |x| {float(x.abs().mean()):.3g}, changed routes {changed}")
    assert mean["replay"] < mean["record"]
