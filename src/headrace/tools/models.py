"""`headrace models`: the families of models that are tested with every release, and what works with each.

`tests/models` runs each of them; `FAMILIES` is what it must find. `make docs` writes the table to
docs/reference/models.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from headrace.inference.model_shape import LATENT_KEYS

LINEAR = "linear_attention"
"""What the embedded engine names when it refuses a model."""
ASSERTION = "no: fails with an assertion"
NO_TORCHVISION = "no: its code needs torchvision"


class Family(NamedTuple):
    """A family, by its `model_type`."""

    models: str
    """Models of the family that people train."""
    experts: bool = False
    engine: str = ""
    """What the embedded engine does not compute, so that it refuses the model; empty: it samples from it."""
    vllm: str = ""
    """What was not shown with vLLM 0.32 on CPUs; empty: it samples from the family and takes new weights."""


FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2, Qwen2.5"),
    "qwen3": Family("Qwen3"),
    "llama": Family("Llama 2 to 3.3, SmolLM2, Yi"),
    "mistral": Family("Mistral 7B, Mistral Nemo, Mistral Small 24B (text)"),
    "gemma2": Family("Gemma 2"),
    "gemma3_text": Family("Gemma 3 (text)"),
    "phi3": Family("Phi-3, Phi-4"),
    "olmo2": Family("OLMo 2"),
    "olmo3": Family("OLMo 3"),
    "smollm3": Family("SmolLM3"),
    "granite": Family("Granite 3"),
    "glm4": Family("GLM-4"),
    "exaone4": Family("EXAONE 4"),
    "starcoder2": Family("StarCoder2"),
    "ministral3": Family("Ministral 3"),
    "gemma4_text": Family("Gemma 4 (text)"),
    "qwen3_5_text": Family("Qwen3.5 (text)", engine=LINEAR, vllm=NO_TORCHVISION),
    "qwen3_moe": Family("Qwen3 30B-A3B, 235B-A22B", experts=True),
    "qwen2_moe": Family("Qwen1.5 and Qwen2 with experts", experts=True),
    "mixtral": Family("Mixtral", experts=True),
    "olmoe": Family("OLMoE", experts=True),
    "granitemoe": Family("Granite 3 with experts", experts=True),
    "gpt_oss": Family("gpt-oss", experts=True, vllm=ASSERTION),
    "deepseek_v3": Family(
        "DeepSeek V3, R1, Kimi K2", experts=True, engine=LATENT_KEYS, vllm="no: not shown with a tiny model"
    ),
    "glm4_moe": Family("GLM-4.5", experts=True),
    "minimax_m2": Family("MiniMax M2", experts=True, vllm="no: vLLM reads a scoring_func that its config lacks"),
    "qwen3_5_moe_text": Family("Qwen3.5 with experts (text)", experts=True, engine=LINEAR, vllm=NO_TORCHVISION),
}


PREFACE = """\
# Models

`make docs` writes this page; `headrace models` prints the table. `tests/models` trains, samples, publishes, adapts and
exports a tiny random model of each family, and compares it with plain transformers: the loss and gradients of packed
rows with shared prefixes; the logprobs of the engine with chunked prompts, cached prefixes and seeds; new weights in
the engine, from files, over the link and through shared memory; LoRA adapters in PEFT; the exported model in
transformers. The column of vLLM (0.32, on CPUs) is what `tests/vllm` has shown: sampling before and after new weights.

A family that is not in the table may work: trainer and engine compare themselves with the plain model when they load
it, and refuse a model that they do not reproduce. Models with images or sound are refused, and so are models with an
encoder.

- **Experts** are stacked in memory and stored one by one in files; the conversion is transformers' own. They are
  trained by grouped matrix products. Adapters of models with experts change the attention; those with
  `target_modules = ["all-linear", "experts"]` change the experts, too, as PEFT's `target_parameters`.
- **Router replay** (`trainer.router_replay`): the trainer's layers take the experts that the engine took, so that the
  two agree as closely as for dense models. The embedded engine returns them, and so does vLLM (0.26 or newer) on GPUs;
  with vLLM on CPUs such a run is refused before it starts.
- **Capped attention scores** (Gemma 2), **attention sinks** (gpt-oss) and **compressed keys** (DeepSeek) are trained
  with `trainer.attention = "sdpa"`, which `auto` chooses for them: slower on a GPU than flash attention.
- **Linear attention** (Qwen3.5) computes a shared prefix once per sequence.
- transformers' own faster attention ignores capped scores: compare with `attn_implementation="eager"`.
"""


def table() -> str:
    """Return the families as a table in Markdown."""
    rows = [("family", "models", "experts", "training", "embedded engine", "vLLM", "router replay")]
    for name, family in FAMILIES.items():
        engines = (f"no: {family.engine}" if family.engine else "yes", family.vllm or "yes")
        replay = ("with vLLM" if family.engine else "yes") if family.experts else ""
        rows.append((name, family.models, "yes" if family.experts else "", "yes", *engines, replay))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def page() -> str:
    return f"{PREFACE}\n{table()}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
