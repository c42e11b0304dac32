"""The table of families, for `headrace models` and docs/reference/models.md (`make docs`)."""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.tools.models.families import FAMILIES

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
