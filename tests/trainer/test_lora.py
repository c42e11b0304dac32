"""Adapters: what they compute is what PEFT computes, the base stays as it was, and files go both ways."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from headrace.cli.main import main
from headrace.config.trainer import TrainerConfig
from headrace.trainer.checkpoint import ResumeError
from headrace.trainer.learner import Learner
from headrace.trainer.lora import LoraLinear, adapter_layers, add_lora, merged_parameters
from headrace.trainer.model import PackedModel
from headrace.trainer.ranks import Ranks
from headrace.transport.adapter import Adapter, AdapterConfig, read_adapter, write_adapter
from tests.refusals import refused
from tests.trainer.losses import default_loss
from tests.trainer.training_samples import ARCHITECTURES, random_samples, write_random_model

TOKENS = torch.tensor([[1, 5, 9, 2, 7, 7, 30, 95]])
EVERYTHING = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("base"), ARCHITECTURES[request.param])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("base"), ARCHITECTURES["qwen3"])


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def adapted(directory: Path, **settings: Any) -> tuple[Any, AdapterConfig]:
    """A model with an adapter that says something, as a trained one does."""
    model = load(directory)
    config = add_lora(model, **{"r": 4, "alpha": 8, "base": str(directory), **settings})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for matrices in adapter_layers(dict(model.named_parameters())).values():
            matrices.b.normal_(std=0.3, generator=generator)
    return model, config


def save(model: Any, config: AdapterConfig, directory: Path) -> Path:
    write_adapter(directory, Adapter(config, adapter_layers(dict(model.named_parameters()))))
    return directory


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def assert_same_logits(ours: Any, theirs: Any) -> None:
    """In float64, where the order of products does not show."""
    found, expected = logits(ours.double()), logits(theirs.double())
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"r": 3, "alpha": 7, "use_rslora": True},
        {"target_modules": ["q_proj", "mlp.down_proj"]},
        {"target_modules": ["layers.1.self_attn.v_proj"]},
    ],
    ids=["all linear layers", "rank-stabilised", "some layers", "one layer"],
)
def test_peft_gives_an_adapter_from_here_the_same_logits(base: Path, tmp_path: Path, settings: dict[str, Any]):
    model, config = adapted(base, **settings)
    theirs = PeftModel.from_pretrained(load(base), save(model, config, tmp_path)).eval()
    assert (logits(model) - logits(load(base))).abs().max() > 0.1 * logits(model).abs().max()
    assert_same_logits(model, theirs)
    ours = {name for name, part in model.named_modules() if isinstance(part, LoraLinear)}
    found = {name for name, part in theirs.base_model.model.named_modules() if hasattr(part, "lora_A")}
    assert ours == found


@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_an_adapter_from_peft_gives_the_same_logits_here(base: Path, tmp_path: Path, rank_stabilised: bool):
    settings = LoraConfig(
        r=6,
        lora_alpha=9,
        target_modules="all-linear",
        use_rslora=rank_stabilised,
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(3)
    theirs = get_peft_model(load(base), settings).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    theirs.save_pretrained(tmp_path)
    ours = load(base)
    add_lora(ours, r=6, alpha=9, use_rslora=rank_stabilised)
    own = adapter_layers(dict(ours.named_parameters()))
    for layer, matrices in read_adapter(tmp_path).layers.items():
        for parameter, tensor in zip(own.pop(layer), matrices, strict=True):
            parameter.data.copy_(tensor)
    assert not own
    assert_same_logits(ours, theirs)


def test_files_have_the_names_and_settings_that_peft_writes(qwen3: Path, tmp_path: Path):
    model, config = adapted(qwen3)
    ours = save(model, config, tmp_path / "ours")
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=EVERYTHING, task_type="CAUSAL_LM")
    get_peft_model(load(qwen3), settings).save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    tensors = load_file(ours / "adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in theirs.items()}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    expected = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    written = json.loads((ours / "adapter_config.json").read_text())
    assert written.pop("target_modules") == sorted(expected["target_modules"]) == EVERYTHING
    assert written == {key: expected[key] for key in written}


def test_a_new_adapter_changes_nothing_and_is_the_same_for_the_same_seed(base: Path):
    models = [load(base) for _ in range(3)]
    for model, seed in zip(models, (7, 7, 8), strict=True):
        add_lora(model, r=4, alpha=8, seed=seed)
    first, same, other = ({n: p for n, p in m.named_parameters() if "lora_A" in n} for m in models)
    assert torch.equal(logits(models[0]), logits(load(base)))
    assert all(torch.equal(first[name], same[name]) and not torch.equal(first[name], other[name]) for name in first)
    widest = first["model.layers.0.mlp.down_proj.lora_A"]
    assert widest.shape == (4, 48)
    assert 0.8 / 48**0.5 < widest.abs().max() < 1 / 48**0.5  # uniform, as PEFT and torch.nn.Linear start


def test_only_the_adapter_is_trained(base: Path):
    model, _ = adapted(base)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(trained) == {name for name in before if name.endswith((".lora_A", ".lora_B"))}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    for _ in range(3):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pristine = load(base).state_dict()
    for name, parameter in model.named_parameters():
        if name in trained:
            assert not torch.equal(parameter, before[name])
        else:
            assert torch.equal(parameter, pristine[name])


def test_names_of_the_base_stay_as_they_were(base: Path):
    model, _ = adapted(base)
    names = [name for name, _ in model.named_parameters() if not name.endswith((".lora_A", ".lora_B"))]
    assert names == [name for name, _ in load(base).named_parameters()]


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_those_of_the_plain_formula(recomputed: bool):
    generator = torch.Generator().manual_seed(0)
    plain = torch.nn.Linear(7, 5).double()
    layer = LoraLinear(plain, 3, 0.7, generator).double()
    with torch.no_grad():
        layer.lora_B.normal_(generator=generator)
    x = torch.randn(2, 4, 7, dtype=torch.double, generator=generator)
    direction = torch.randn(2, 4, 5, dtype=torch.double, generator=generator)
    output = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
    (output * direction).sum().backward()
    # y = x W' + x A' B' s, so dB = s direction' (x A') and dA = s B' direction' x, summed over tokens
    flat, d = x.reshape(8, 7), direction.reshape(8, 5)
    a, b = layer.lora_A.detach(), layer.lora_B.detach()
    torch.testing.assert_close(output.reshape(8, 5), flat @ (plain.weight + 0.7 * b @ a).T + plain.bias)
    torch.testing.assert_close(layer.lora_A.grad, 0.7 * b.T @ d.T @ flat)
    torch.testing.assert_close(layer.lora_B.grad, 0.7 * d.T @ flat @ a.T)


def test_merged_parameters_are_a_plain_model_with_the_same_logits(base: Path):
    model, config = adapted(base)
    plain = load(base)
    parameters = dict(model.named_parameters())
    pristine = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    merged = merged_parameters({name: p.detach() for name, p in parameters.items()}, config.scaling)
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(merged, strict=False)
    name = "model.layers.1.mlp.up_proj"
    a, b = parameters[f"{name}.lora_A"], parameters[f"{name}.lora_B"]
    assert torch.equal(merged[f"{name}.weight"], pristine[f"{name}.weight"] + 2.0 * (b @ a))
    assert_same_logits(plain, model)


def test_in_bfloat16_compute_the_adapter_stays_float32_and_learns(qwen3: Path):
    model, _ = adapted(qwen3)
    expected = logits(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=TOKENS, labels=TOKENS)
    output.loss.backward()
    assert (output.logits - expected).abs().max() < 0.05 * expected.abs().max()
    for a, b in adapter_layers(dict(model.named_parameters())).values():
        assert a.grad.dtype == b.grad.dtype == torch.float32
        assert a.grad.any() and b.grad.any()


def test_a_layer_compiles_without_a_break(qwen3: Path):
    model, _ = adapted(qwen3)
    expected = logits(model)
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager", fullgraph=True)
    assert torch.equal(logits(model), expected)


def test_a_sharded_model_learns_what_a_whole_one_does(base: Path):
    whole, _ = adapted(base)
    sharded, _ = adapted(base)
    whole(input_ids=TOKENS, labels=TOKENS).loss.backward()
    mesh = Ranks().mesh()
    for part in (*sharded.model.layers, sharded):  # frozen and trained parameters share a group
        fully_shard(part, mesh=mesh)
    sharded(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, parameter in sharded.named_parameters():
        expected = whole.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), expected)


@pytest.mark.parametrize("target", ["lm_head", "q_project", "proj"])
def test_targets_that_are_no_linear_layers_are_refused_with_the_known_ones(qwen3: Path, target: str):
    with refused(key="lora.target_modules", value=[target]) as error:
        add_lora(load(qwen3), r=4, alpha=8, target_modules=["q_proj", target])
    assert ", ".join(EVERYTHING) in (error.value.fix or "")


def test_a_base_in_bfloat16_learns_a_float32_adapter_and_is_merged_in_float32(qwen3: Path, tmp_path: Path):
    model = PackedModel(qwen3, dtype=torch.bfloat16, lora={"r": 4, "alpha": 8})
    parameters = dict(model.module.named_parameters())
    assert {p.dtype for name, p in parameters.items() if ".lora_" in name} == {torch.float32}
    assert {p.dtype for name, p in parameters.items() if ".lora_" not in name} == {torch.bfloat16}
    row, places, ones = model.pack_row([np.arange(40)]), torch.arange(39), torch.ones(39)
    scores = model.score(row, places, places + 1, ones)
    scores.logprobs.sum().backward()
    assert {name for name, p in parameters.items() if p.grad is not None} == set(model.trained_tensors())
    with torch.no_grad():
        for matrices in adapter_layers(parameters).values():
            matrices.b.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    exact = PackedModel(qwen3, lora={"r": 4, "alpha": 8})
    for name, tensor in model.trained_tensors().items():
        exact.module.get_parameter(name).data.copy_(tensor)
    given, expected = (each.logprobs(row, places, places + 1, ones) for each in (model, exact))
    assert 0 < (given - expected).abs().max() < 0.05
    model.save(tmp_path, torch.float32)
    merged = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    a, b = parameters[f"{name}.lora_A"], parameters[f"{name}.lora_B"]
    torch.testing.assert_close(merged[f"{name}.weight"], parameters[f"{name}.weight"].float() + 2 * b @ a)


@pytest.fixture
def make_learner(qwen3: Path, tmp_path: Path) -> Callable[..., Learner]:
    def make(resume: str | None = "latest", **lora: Any) -> Learner:
        config = TrainerConfig.model_validate(
            {
                "model": {"name": str(qwen3)},
                "output_dir": tmp_path,
                "max_steps": 4,
                "seq_len": 32,
                "optim": {"lr": 1e-2},
                "lora": {"r": 4, "alpha": 8, **lora},
            }
        )
        return Learner(config, {"rl": default_loss}, tmp_path / "checkpoints", resume)

    return make


def learn(learner: Learner, first: int, last: int) -> None:
    for step in range(first, last + 1):
        assert learner.learn(random_samples(step, 4), stopped=lambda: False)


def test_a_resumed_adapter_ends_as_one_that_was_never_stopped(make_learner: Callable[..., Learner], tmp_path: Path):
    straight = make_learner()
    learn(straight, 1, 4)
    stopped = make_learner()
    learn(stopped, 1, 2)
    stopped.begin_checkpoint()
    stopped.checkpoints.finish(wait=True)
    (saved,) = (tmp_path / "checkpoints" / "step-00000002" / "tensors").iterdir()
    with safe_open(saved, framework="pt") as file:
        assert all(".lora_" in name for name in file.keys())  # noqa: SIM118 (it is no mapping)
    resumed = make_learner()
    learn(resumed, 3, 4)
    for name, tensor in straight.model.tensors().items():
        assert torch.equal(tensor, resumed.model.tensors()[name]), name
    with pytest.raises(ResumeError, match=r"rank 4.*rank 8"):
        make_learner(r=8)


def test_what_is_left_of_a_run_is_the_merged_model_and_the_adapter_that_peft_loads(
    make_learner: Callable[..., Learner], qwen3: Path, tmp_path: Path
):
    learner = make_learner()
    learn(learner, 1, 2)
    learner.begin_checkpoint()
    learner.checkpoints.finish(wait=True)
    learner.save_final_model(tmp_path / "model")
    source = str(tmp_path / "checkpoints" / "step-00000002")
    assert main(["export", source, str(tmp_path / "merged")]) == 0
    assert main(["export", source, str(tmp_path / "adapter only"), "--adapter"]) == 0
    learner.model.module.set_attn_implementation("sdpa")
    for merged in ("model", "merged"):
        assert_same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / merged), learner.model.module)
    for adapter in ("adapter", "adapter only"):
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(qwen3), tmp_path / adapter)
        assert_same_logits(peft, learner.model.module)
