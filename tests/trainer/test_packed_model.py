"""A packed row gives each sequence what it would get alone, and models that would break this are refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from headrace.trainer import model as model_module
from headrace.trainer.attention import UnsupportedModel
from headrace.trainer.lm_head import hidden_states, label_logprobs
from headrace.trainer.model import PackedModel
from headrace.trainer.packed_row import PackedRow, make_row
from tests.refusals import refused
from tests.trainer.training_samples import ARCHITECTURES, SIZES, write_random_model

CPU = torch.device("cpu")


def mixed_sequences() -> list[np.ndarray]:
    """Short, long, alone, twice the same, and groups that share a little or most of their tokens."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 96, 20)
    groups = [np.concatenate([prompt, rng.integers(0, 96, n)]) for n in (1, 3, 3, 9, 30)]
    alone = [rng.integers(0, 96, n) for n in (1, 2, 7, 40, 100)]
    return [*groups, *alone, groups[1], prompt[:11]]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_logprobs_are_those_of_each_sequence_alone(name: str, tmp_path: Path):
    directory = write_random_model(tmp_path, ARCHITECTURES[name])
    packed = PackedModel(directory)
    plain = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    sequences = mixed_sequences()
    row = make_row([sequence[:-1] if len(sequence) > 1 else sequence for sequence in sequences], CPU)
    assert row.token_ids.shape[1] < sum(map(len, sequences)) - 80  # prefixes are shared
    hidden = hidden_states(packed.module, row)
    for sequence, places in zip(sequences, row.places, strict=True):
        if len(sequence) == 1:
            continue
        labels = torch.from_numpy(sequence[1:])
        given, _ = label_logprobs(
            hidden[places], packed.module.get_output_embeddings().weight, labels, torch.ones(len(labels)), 8
        )
        logits = plain(torch.from_numpy(sequence)[None]).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "gemma3, sliding and full"])
def test_gradients_of_sequences_that_share_a_prefix_add_up(tmp_path: Path, name: str):
    directory = write_random_model(tmp_path, ARCHITECTURES[name])
    packed = PackedModel(directory)
    plain = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    sequences = mixed_sequences()
    row = make_row(sequences, CPU)
    hidden = hidden_states(packed.module, row)
    direction = torch.randn(hidden.shape[1])
    sum((hidden[places] @ direction).sum() for places in row.places).backward()
    sum((plain.model(torch.from_numpy(s)[None]).last_hidden_state @ direction).sum() for s in sequences).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in packed.named_parameters().items():
        scale = float(expected[name].grad.abs().max())
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4 * scale, rtol=1e-4)


def test_saved_model_is_a_hugging_face_directory_with_the_same_tensors(tiny_model: Path, tmp_path: Path):
    model = PackedModel(tiny_model)
    model.save_for_engine(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in tiny_model.iterdir()}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(tiny_model).state_dict().items():
        assert torch.equal(theirs[name], tensor)


def test_saved_model_can_be_narrower_and_says_so_in_its_configuration(tiny_model: Path, tmp_path: Path):
    PackedModel(tiny_model).save(tmp_path, torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_completion_marker_of_a_published_model_is_not_copied_along(tiny_model: Path, tmp_path: Path):
    source = tmp_path / "published"
    PackedModel(tiny_model).save_for_engine(source)
    (source / "COMPLETE.json").write_text("{}")
    PackedModel(source).save_for_engine(tmp_path / "out")
    assert not (tmp_path / "out" / "COMPLETE.json").exists()


def test_missing_tensors_are_an_error_that_names_them(tiny_model: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    PackedModel(tiny_model).save_for_engine(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight"):
        PackedModel(tmp_path)


def test_a_head_that_computes_something_else_is_refused_at_load(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_module, "plain_logits", lambda model, hidden: 2 * hidden @ model.lm_head.weight.t())
    with refused(UnsupportedModel, key="model.name", value=tiny_model):
        PackedModel(tiny_model)


DEEP = {**SIZES, "num_hidden_layers": 48, "head_dim": 16, "initializer_range": 0.3}
DEEPER = {**DEEP, "num_hidden_layers": 192, "initializer_range": 0.6}
"""So deep that rounding to bfloat16 moves logits by more than a twentieth of the largest, as in large models."""
ADAPTER = {"r": 2, "alpha": 4}


@pytest.mark.full
def test_a_deep_model_in_16_bits_may_differ_by_its_measured_rounding(tmp_path: Path):
    directory = write_random_model(tmp_path, Qwen3Config(**DEEPER))
    assert PackedModel(directory, dtype=torch.bfloat16, lora=ADAPTER).module.dtype == torch.bfloat16


def test_wrong_positions_in_a_packed_row_exceed_the_measured_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def with_running_positions(*arguments: object) -> PackedRow:
        row = make_row(*arguments)
        return replace(row, position_ids=torch.arange(row.token_ids.shape[1])[None])

    directory = write_random_model(tmp_path, Qwen3Config(**DEEP))
    monkeypatch.setattr(model_module, "make_row", with_running_positions)
    for lora, dtype in ((ADAPTER, torch.bfloat16), (None, torch.float32)):
        with pytest.raises(UnsupportedModel, match="packed"):
            PackedModel(directory, dtype=dtype, lora=lora)


def test_multimodal_models_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}')
    with pytest.raises(UnsupportedModel, match="multimodal"):
        PackedModel(tmp_path)
