"""A small ChatML tokenizer, made here: byte-level BPE with a few merges and Qwen3's special tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

WriteModel = Callable[..., Path]


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the cat sat on the mat, and hello to the cat there"] * 3, trainer)
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    return made


@pytest.fixture
def write_model(tmp_path: Path, backend: tokenizers.Tokenizer) -> WriteModel:
    """Writes a model directory without weights; keyword arguments go into `tokenizer_config.json`."""

    def write(template: str | None = CHATML, model_type: str = "qwen3", **settings: Any) -> Path:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        backend.save(str(directory / "tokenizer.json"))
        tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        content = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **settings}
        (directory / "tokenizer_config.json").write_text(json.dumps(content))
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)
        return directory

    return write
