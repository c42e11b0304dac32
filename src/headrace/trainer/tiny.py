"""The tiny model, small enough for a laptop's CPU: Qwen3's architecture and chat format with a byte vocabulary.

First runs and tests work with it without downloads. Its weights are random; `headrace sft` trains it first. Its config
(`tiny_model/`) has few layers, many heads and a wide initialization: it learned to copy and reverse soonest.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from headrace.text.tokenizer import byte_tokenizer

ROLE_TOKENS = ("system", "user", "assistant")
"""Tokens for the role names of the chat format: as bytes they would be a third of a short conversation."""


def write_tiny_model(directory: Path, seed: int = 0) -> None:
    """Write a Hugging Face directory; the same seed gives the same bytes. The caller's RNG state is not changed."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny_settings(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def write_tiny_settings(directory: Path) -> None:
    """Write all files but the weights, without torch: enough to render and count prompts."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(ROLE_TOKENS).save(str(directory / "tokenizer.json"))
    for file in resources.files("headrace.trainer").joinpath("tiny_model").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
