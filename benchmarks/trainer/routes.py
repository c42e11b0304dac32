"""How much of the difference between an engine in bfloat16 and a trainer in float32 is the choice of experts.

Tiny random models of several families on a CPU, the same weights in both: 32 requests of 24 tokens sample 32 each, and
the trainer scores them with its own experts (`record`) and with the engine's (`replay`). Values are means of
exp(x) - x - 1, where x is the difference of a token's logprobs; `routing` has that between the trainer's two.

    python -m benchmarks.trainer.routes
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.inference.embedded.engine import Engine
from headrace.trainer.model import PackedModel
from tests.inference.plain_forward import random_prompt
from tests.models.families import EXPERTS, write_model
from tests.models.test_routes import sampled, scores

FAMILIES = ("qwen3", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe")


def divergence(x: Tensor) -> str:
    return f"{float((x.double().exp() - x.double() - 1).mean()):.1e}"


def main() -> None:
    print("| family | own experts | replayed experts | routing | changed routes |\n|---|---|---|---|---|")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            directory = write_model(Path(scratch), family)
            engine_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
            engine_model.save_pretrained(directory)  # the trainer has the same rounded weights
            engine = Engine(engine_model, max_model_len=80, max_running=32, routed_experts=True, compile=False)
            rng = random.Random(0)
            samples = sampled(engine, [random_prompt(rng, 24) for _ in range(32)], tokens=32)
            found = {}
            for mode in ("record", "replay") if family in EXPERTS else ("off",):
                model = PackedModel(directory, router_replay=mode)  # type: ignore[arg-type]
                logprobs, engines = scores(model, samples)
                found[mode] = logprobs.detach()
            layers = model.routing.statistics.values()
            changed = f"{max(float(each.changed / each.recorded) for each in layers):.1%}" if layers else ""
            own = found.get("record", found.get("off", engines))
            replayed = divergence(found["replay"] - engines) if layers else ""
            routing = divergence(own - found["replay"]) if layers else ""
            print(f"| {family} | {divergence(own - engines)} | {replayed} | {routing} | {changed} |", flush=True)


if __name__ == "__main__":
    main()
