"""The optimizers against their formulas, their state across a restart, and the refusal of broken gradients."""

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Parameter
from transformers import AutoModelForCausalLM

from headrace.config.trainer import AdamWConfig, MuonConfig, OptimConfig, SgdConfig, TrainerConfig
from headrace.errors import BadInput
from headrace.trainer.adam8bit import Adam8bit
from headrace.trainer.learner import Learner
from headrace.trainer.optim import Optimizer, UpdateRule, adamw, hidden_matrices, muon, sgd, update_rule
from tests.refusals import refused
from tests.trainer.losses import default_loss
from tests.trainer.training_samples import ARCHITECTURES, random_samples, write_random_model

RULES: dict[str, UpdateRule] = {
    "adamw": partial(adamw, weight_decay=0.1),
    "adamw in 8 bits": partial(adamw, weight_decay=0.1, state_bits=8),
    "muon": partial(muon, hidden={"wide", "tall"}, weight_decay=0.1),
    "sgd": partial(sgd, weight_decay=0.1),
    "sgd with momentum": partial(sgd, momentum=0.9, weight_decay=0.1),
    "sgd with nesterov": partial(sgd, momentum=0.9, nesterov=True),
}
LR = 0.01


def parameter(*values: float) -> Parameter:
    return Parameter(torch.tensor(values))


def random_parameters(device: str = "cpu") -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (6, 9), "tall": (12, 5), "embedding": (7, 6), "norm": (6,)}
    return {name: Parameter(torch.randn(shape, generator=generator).to(device)) for name, shape in shapes.items()}


def give_gradients(parameters: dict[str, Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in parameters.values():
        value.grad = torch.randn(value.shape, generator=generator).to(value.device)


def train(optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        give_gradients(optimizer.parameters, seed=step)
        optimizer.step(LR * step)


def test_first_step_of_adamw_moves_each_parameter_by_the_learning_rate():
    # Adam's first step is lr * g / (|g| + eps), whatever the size of g.
    weight = parameter(1.0, 2.0)
    optimizer = Optimizer({"weight": weight}, max_grad_norm=None)
    weight.grad = torch.tensor([5.0, -0.01])
    assert optimizer.step(lr=0.1) == pytest.approx(math.hypot(5.0, 0.01))
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, 2.1]))
    assert weight.grad is None


def adamw_steps(value: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """The formula of Loshchilov and Hutter, with the weight decay of RULES."""
    m = v = torch.zeros_like(value)
    for step, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        value = value * (1 - LR * step * 0.1)
        value = value - LR * step * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    return value


def muon_steps(value: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Momentum, Newton-Schulz with Jordan's coefficients, and the scale of Moonshot's "Muon is Scalable"."""
    m = torch.zeros_like(value)
    for step, g in enumerate(gradients, 1):
        m = 0.95 * m + 0.05 * g
        x = 0.05 * g + 0.95 * m  # Nesterov
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        value = value * (1 - LR * step * 0.1) - LR * step * 0.2 * math.sqrt(max(value.shape)) * x
    return value


def sgd_steps(
    value: torch.Tensor,
    gradients: list[torch.Tensor],
    momentum: float = 0.0,
    nesterov: bool = False,
    decay: float = 0.1,
) -> torch.Tensor:
    m = torch.zeros_like(value)
    for step, g in enumerate(gradients, 1):
        g = g + decay * value
        m = momentum * m + g
        value = value - LR * step * (g + momentum * m if nesterov else m)
    return value


@pytest.mark.parametrize(
    ("rule", "name", "formula"),
    [
        ("adamw", "wide", adamw_steps),
        ("adamw", "norm", adamw_steps),
        ("muon", "wide", muon_steps),
        ("muon", "tall", muon_steps),
        ("muon", "embedding", adamw_steps),  # Muon is for hidden matrices alone
        ("muon", "norm", adamw_steps),
        ("sgd", "wide", sgd_steps),
        ("sgd with momentum", "wide", partial(sgd_steps, momentum=0.9)),
        ("sgd with nesterov", "norm", partial(sgd_steps, momentum=0.9, nesterov=True, decay=0.0)),
    ],
)
def test_steps_follow_the_formula(rule: str, name: str, formula):
    optimizer = Optimizer(random_parameters(), RULES[rule], max_grad_norm=None)
    train(optimizer, 1, 3)
    gradients = []
    for seed in (1, 2, 3):
        other = random_parameters()
        give_gradients(other, seed)
        gradients.append(other[name].grad)
    expected = formula(random_parameters()[name].detach(), gradients)
    torch.testing.assert_close(optimizer.parameters[name].detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_the_rule_with_clipped_gradients(rule: str):
    optimizer = Optimizer(random_parameters(), RULES[rule], max_grad_norm=1.0)
    train(optimizer, 1, 4)
    plain = random_parameters()
    parts = RULES[rule](plain)
    for step in range(1, 5):
        give_gradients(plain, seed=step)
        torch.nn.utils.clip_grad_norm_(plain.values(), 1.0)
        for part in parts:
            part.param_groups[0]["lr"] = LR * step
            part.step()
    for name, value in optimizer.parameters.items():
        assert torch.equal(value, plain[name])


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_optimizer_repeats_an_uninterrupted_one_bit_for_bit(rule: str, tmp_path: Path):
    straight = Optimizer(random_parameters(), RULES[rule])
    train(straight, 1, 6)
    before = Optimizer(random_parameters(), RULES[rule])
    train(before, 1, 3)
    save_file(before.state_tensors(), tmp_path / "optimizer.safetensors")
    resumed = Optimizer({n: Parameter(p.detach().clone()) for n, p in before.parameters.items()}, RULES[rule])
    resumed.load_state_tensors(load_file(tmp_path / "optimizer.safetensors"))
    train(resumed, 4, 6)
    for name, value in straight.parameters.items():
        assert torch.equal(value, resumed.parameters[name])
    state = resumed.state_tensors()
    assert state.keys() == straight.state_tensors().keys()
    assert all(torch.equal(value, state[name]) for name, value in straight.state_tensors().items())


def test_state_is_named_by_parameter():
    optimizer = Optimizer(random_parameters(), RULES["muon"])
    assert optimizer.state_tensors() == {}
    train(optimizer, 1, 1)
    moments = {f"{name}.{moment}" for name in ("embedding", "norm") for moment in ("step", "exp_avg", "exp_avg_sq")}
    assert optimizer.state_tensors().keys() == {"wide.momentum_buffer", "tall.momentum_buffer"} | moments


def test_gradients_are_scaled_down_to_the_norm_but_never_up():
    for gradient, expected in ((3.0, 1.0), (0.5, 0.5)):
        weight = parameter(0.0)
        optimizer = Optimizer({"weight": weight}, max_grad_norm=1.0)
        weight.grad = torch.tensor([gradient])
        assert optimizer.step(lr=0.0) == pytest.approx(gradient)
        assert optimizer.state_tensors()["weight.exp_avg"].item() == pytest.approx(0.1 * expected, rel=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_step_with_a_broken_gradient_is_skipped_counted_and_said(
    rule: str, broken: float, caplog: pytest.LogCaptureFixture
):
    optimizer, untouched = Optimizer(random_parameters(), RULES[rule]), Optimizer(random_parameters(), RULES[rule])
    train(optimizer, 1, 1)
    train(untouched, 1, 1)
    give_gradients(optimizer.parameters, seed=9)
    optimizer.parameters["norm"].grad[3] = broken  # one value in one parameter stops all of them
    with caplog.at_level(logging.WARNING):
        assert not math.isfinite(optimizer.step(LR))
    assert optimizer.skipped == 1
    assert "(1 skipped so far)" in caplog.text
    assert all(value.grad is None for value in optimizer.parameters.values())
    train(optimizer, 2, 2)  # neither parameters nor moments have seen it
    train(untouched, 2, 2)
    for name, value in untouched.parameters.items():
        assert torch.equal(value, optimizer.parameters[name])


def test_a_parameter_without_a_gradient_is_left_alone_and_has_no_state():
    parameters = random_parameters()
    optimizer = Optimizer(parameters, RULES["muon"])
    give_gradients(parameters, seed=1)
    parameters["wide"].grad = parameters["norm"].grad = None
    optimizer.step(LR)
    assert torch.equal(parameters["wide"], random_parameters()["wide"])
    state = optimizer.state_tensors()
    assert not any(name.startswith(("wide", "norm")) for name in state)
    Optimizer(random_parameters(), RULES["muon"]).load_state_tensors(state)


def test_an_incomplete_state_is_refused():
    optimizer = Optimizer({"weight": parameter(1.0)})
    with refused(BadInput, key="weight"):
        optimizer.load_state_tensors({"weight.exp_avg": torch.zeros(1)})


@pytest.mark.parametrize(
    ("saved", "resumed"), [("adamw", "muon"), ("muon", "adamw"), ("adamw", "sgd"), ("muon", "sgd")]
)
def test_the_state_of_another_type_has_tensors_that_are_not_loaded(saved: str, resumed: str):
    """The learner refuses a checkpoint with such tensors."""
    optimizer = Optimizer(random_parameters(), RULES[saved])
    train(optimizer, 1, 1)
    names = optimizer.state_tensors().keys()
    assert names - Optimizer(random_parameters(), RULES[resumed]).empty_state(names).keys()


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_between_embeddings_and_head(tied: bool):
    settings = ARCHITECTURES["qwen2"].to_dict() | {"tie_word_embeddings": tied}
    model = AutoModelForCausalLM.from_config(type(ARCHITECTURES["qwen2"]).from_dict(settings))
    found = hidden_matrices(model)
    kinds = {name.split(".", 3)[-1] for name in found}
    projections = {f"self_attn.{kind}_proj.weight" for kind in "qkvo"}
    assert kinds == projections | {f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")}
    assert len(found) == 2 * 7  # two layers
    muons, adamws = muon(dict(model.named_parameters()), hidden=found)
    assert len(muons.param_groups[0]["params"]) == len(found)
    assert sum(len(part.param_groups[0]["params"]) for part in (muons, adamws)) == len(list(model.parameters()))


@pytest.mark.parametrize(
    "config", [AdamWConfig(), AdamWConfig(state_bits=8), MuonConfig(), SgdConfig(momentum=0.5, nesterov=True)]
)
def test_every_key_of_a_configuration_reaches_its_rule(config: OptimConfig):
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["llama"])
    settings = config.model_dump(exclude={"type", "lr", "max_grad_norm", "offload_state"})
    parts = update_rule(config.type, model, **settings)(dict(model.named_parameters()))
    groups = [group for part in parts for group in part.param_groups]
    assert any(isinstance(part, Adam8bit) for part in parts) == (settings.pop("state_bits", 32) == 8)
    for key, value in settings.items():
        assert any(group.get(key) == value for group in groups)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_treats_each_parameter_by_itself(rule: str):
    # Offloaded state comes to the GPU for one parameter at a time, which must change nothing.
    def one_by_one(parameters: dict[str, Parameter]) -> list[torch.optim.Optimizer]:
        return [part for name, value in parameters.items() for part in RULES[rule]({name: value})]

    together, apart = Optimizer(random_parameters(), RULES[rule]), Optimizer(random_parameters(), one_by_one)
    train(together, 1, 3)
    train(apart, 1, 3)
    for name, value in together.parameters.items():
        assert torch.equal(value, apart.parameters[name])


def test_offloading_changes_nothing_on_a_cpu():
    offloading, plain = Optimizer(random_parameters(), offload_state=True), Optimizer(random_parameters())
    train(offloading, 1, 3)
    train(plain, 1, 3)
    for name, value in plain.parameters.items():
        assert torch.equal(value, offloading.parameters[name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rule", RULES)
def test_offloaded_state_is_exact_and_on_the_cpu_between_steps(rule: str, tmp_path: Path):
    plain = Optimizer(random_parameters("cuda"), RULES[rule])
    train(plain, 1, 6)
    before = Optimizer(random_parameters("cuda"), RULES[rule], offload_state=True)
    train(before, 1, 3)
    state = before.state_tensors()
    assert {value.device.type for value in state.values()} <= {"cpu"}
    save_file(state, tmp_path / "optimizer.safetensors")
    copies = {name: Parameter(value.detach().clone()) for name, value in before.parameters.items()}
    resumed = Optimizer(copies, RULES[rule], offload_state=True)
    resumed.load_state_tensors(load_file(tmp_path / "optimizer.safetensors"))
    train(resumed, 4, 6)
    for name, value in plain.parameters.items():
        assert torch.equal(value, resumed.parameters[name])
    for name, value in plain.state_tensors().items():
        assert torch.equal(value.cpu(), resumed.state_tensors()[name])


@pytest.mark.parametrize(
    "optim",
    [
        {"type": "muon", "offload_state": True},
        {"type": "sgd", "momentum": 0.9, "nesterov": True, "max_grad_norm": 0.0},
    ],
)
def test_a_learner_resumes_with_any_optimizer(optim: dict[str, Any], tmp_path: Path):
    model = write_random_model(tmp_path / "model", ARCHITECTURES["qwen3"])
    config = TrainerConfig.model_validate(
        {
            "model": {"name": str(model)},
            "output_dir": tmp_path,
            "max_steps": 4,
            "seq_len": 32,
            "optim": {"lr": 1e-3, **optim},
            "scheduler": {"type": "wsd", "warmup_steps": 1, "decay_steps": 2},
        }
    )

    def learn(learner: Learner, first: int, last: int) -> Learner:
        for step in range(first, last + 1):
            assert learner.learn(random_samples(step, 4), stopped=lambda: False) is not None
        return learner

    straight = learn(Learner(config, {"rl": default_loss}, tmp_path), 1, 4)
    saved = learn(Learner(config, {"rl": default_loss}, tmp_path), 1, 2)
    saved.begin_checkpoint()
    saved.checkpoints.finish(wait=True)
    resumed = learn(Learner(config, {"rl": default_loss}, tmp_path, "latest"), 3, 4)
    assert resumed.learning_rate == straight.learning_rate
    for name, value in straight.model.named_parameters().items():
        assert torch.equal(value, resumed.model.named_parameters()[name])
