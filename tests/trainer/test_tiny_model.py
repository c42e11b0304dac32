"""The tiny model is a real Hugging Face directory, and its chat template is Qwen3's."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import MARKUP_TOKENS, SPECIAL_TOKENS, Tokenizer
from headrace.trainer.tiny import write_tiny_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather — today's only.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TEXTS = [
    "hello",
    "",
    "  spaced out \n",
    "\n\nlines\n",
    "naïve café 東京 🙂",
    "<think>\nhm\n</think>\n\nanswer",
    "no opening tag\n</think>\n\n\nanswer",
    "<think>a</think><think>b</think>c",
    "<tool_response>\n42\n</tool_response>",
    '{"not": "a call"}',
]


def random_conversation(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(TEXTS)})
    for _ in range(rng.randint(1, 6)):
        role = rng.choice(["user", "assistant", "tool", "user", "assistant", "system"])
        message: dict[str, Any] = {"role": role, "content": rng.choice(TEXTS)}
        if rng.random() < 0.1:
            message["content"] = [{"type": "text", "text": rng.choice(TEXTS)}, {"type": "text", "text": "!"}]
        if role == "assistant":
            if rng.random() < 0.3:
                message["reasoning_content"] = rng.choice(["", "\nlet me see\n", "thinking"])
            calls: list[dict[str, Any]] = [
                {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Zürich"}}},
                {"type": "function", "id": "2", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
                {"name": "weather", "arguments": {}},
            ]
            if rng.random() < 0.3:
                message["tool_calls"] = rng.sample(calls, rng.randint(1, 3))
        messages.append(message)
    return messages, [WEATHER] * rng.randint(1, 2) if rng.random() < 0.3 else None


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_chat_template_gives_the_tokens_of_the_qwen3_renderer(tiny_model: Path, enable_thinking: bool):
    tokenizer = Tokenizer(tiny_model)
    renderer, template = (
        make_renderer(tiny_model, tokenizer, name, enable_thinking=enable_thinking) for name in ("qwen3", "default")
    )
    rng = random.Random(7)
    for _ in range(300):
        messages, tools = random_conversation(rng)
        for prompt in (False, True):
            expected = renderer.render_ids(messages, tools=tools, add_generation_prompt=prompt)
            given = template.render_ids(messages, tools=tools, add_generation_prompt=prompt)
            assert given == expected, tokenizer.decode(expected)


def test_transformers_tokenizer_agrees_with_ours(tiny_model: Path):
    theirs, ours = AutoTokenizer.from_pretrained(tiny_model), Tokenizer(tiny_model)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (
        ours.eos_token_id,
        ours.convert_tokens_to_ids("<|endoftext|>"),
    )
    rng = random.Random(3)
    for _ in range(20):
        messages, tools = random_conversation(rng)
        text = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert text == ours.apply_chat_template(messages, tools=tools, tokenize=False)
        ids = theirs.encode(text, add_special_tokens=False)
        assert ids == ours.encode(text)
        assert theirs.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_and_only_the_chat_marks_are_hidden_when_decoding(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for token in (*SPECIAL_TOKENS, *MARKUP_TOKENS):
        ids = tokenizer.encode(token, add_special_tokens=False)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == ("" if token in SPECIAL_TOKENS else token)


def test_model_loads_has_just_under_a_million_parameters_and_tied_embeddings(tiny_model: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert 0.7e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.0e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.dtype == torch.float32
    assert GenerationConfig.from_pretrained(tiny_model).eos_token_id == [258, 256]


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tiny_model: Path, tmp_path: Path):
    state = torch.random.get_rng_state()
    write_tiny_model(tmp_path / "again")
    write_tiny_model(tmp_path / "other", seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    names = {path.name for path in tiny_model.iterdir()}
    assert names == {path.name for path in (tmp_path / "again").iterdir()}
    for name in names:
        same = (tiny_model / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == same
        assert ((tmp_path / "other" / name).read_bytes() == same) == (name != "model.safetensors")
