"""What structured outputs and penalties cost per token, and whether every completion that ends by itself is valid.

    OMP_NUM_THREADS=1 python benchmarks/inference/structured.py [--large]

The tiny model with random weights at temperature 1.5, in the embedded engine; with `--large` one of the size of Qwen3
0.6B except for its vocabulary: on a GPU a step of the tiny one only waits for Python. Batches of each kind alternate,
and the requests of the others have the lengths of the structured ones, so that all have the same work and noise.
The engine's own thread is what a step waits for; masks are computed in others, where a core is free for them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.grammar import Grammars
from headrace.inference.embedded.loading import load_model
from headrace.inference.schema import SamplingParams, StructuredOutputs
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.tiny import write_tiny_model

BATCHES, BATCH = 5, 100
RUNNING = 64
MAX_MODEL_LEN = 640
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "layer_types": ["full_attention"] * 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"structured_outputs": StructuredOutputs(json=SCHEMA)},
    "plain": {"ignore_eos": True},
    "penalties": {"ignore_eos": True, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny_model(directory)
        model, tokenizer = load_model(directory), Tokenizer(directory)
        if is_large := sys.argv[1:] == ["--large"]:
            config = AutoConfig.from_pretrained(directory, **LARGE)
            model = AutoModelForCausalLM.from_config(config, dtype=model.dtype).to(model.device).eval()
    vocab = model.get_input_embeddings().num_embeddings
    grammars = Grammars(tokenizer.backend, vocab, [tokenizer.eos_token_id])
    engine = Engine(model, max_model_len=MAX_MODEL_LEN, max_running=RUNNING, decode=tokenizer.decode, grammars=grammars)
    prompt = tokenizer.encode("Invent a person.")
    tokens: Counter[str] = Counter()
    wall: Counter[str] = Counter()
    own_cpu: Counter[str] = Counter()
    cpu: Counter[str] = Counter()
    ended = valid = 0
    for batch in range(-1, BATCHES):  # the first one is a warm-up
        lengths: list[int | None] = [None] * BATCH
        for kind, settings in KINDS.items():
            begun = time.perf_counter(), time.thread_time(), time.process_time()
            params = [SamplingParams(temperature=1.5, max_tokens=length, **settings) for length in lengths]
            requests = [engine.submit(prompt, each) for each in params]
            while engine.has_work:
                engine.step()
            ended_at = time.perf_counter(), time.thread_time(), time.process_time()
            results = [request.future.result() for request in requests]
            if kind == "schema":
                lengths = [len(result.token_ids) for result in results]
            if batch < 0:
                continue
            for total, start, end in zip((wall, own_cpu, cpu), begun, ended_at, strict=True):
                total[kind] += end - start
            tokens[kind] += sum(len(result.token_ids) for result in results)
            if kind == "schema":
                own = [result for result in results if result.finish_reason == "stop"]
                ended += len(own)
                valid += sum(is_valid(tokenizer.decode(result.token_ids, skip_special_tokens=True)) for result in own)
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU"
    size = "28 layers" if is_large else "tiny model"
    title = f"{size}, {BATCHES * BATCH} requests each, {RUNNING} at once, {device}, {valid} of {ended} valid"
    table = Table(title=title)
    for column in (
        "requests",
        "tokens",
        "us/token",
        "cost",
        "CPU, engine's thread",
        "cost",
        "CPU, all threads",
        "cost",
    ):
        table.add_column(column, justify="right")
    for kind in KINDS:
        times = [(each[kind] / tokens[kind], each["plain"] / tokens["plain"]) for each in (wall, own_cpu, cpu)]
        cells = [cell for own, plain in times for cell in (f"{own * 1e6:.1f}", f"{own / plain - 1:+.1%}")]
        table.add_row(kind, str(tokens[kind]), *cells)
    Console().print(table)


def is_valid(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    main()
