"""Every family of models through training, sampling, publishing, LoRA and export, against plain transformers."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from headrace.inference.embedded import scheduler as scheduler_module
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import load_model, refuse_unsupported
from headrace.inference.embedded.self_check import UnsupportedModel
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from headrace.tools.models import FAMILIES as SUPPORT
from headrace.trainer.model import PackedModel
from headrace.trainer.publisher import Publisher
from headrace.transport.weights import WeightStore
from tests.inference.host_driver import HostDriver, use
from tests.inference.plain_forward import assert_like_plain, plain_logprobs, random_prompt, run_all
from tests.inference.weights_sender import SenderProcess
from tests.models.families import EXPERTS, FAMILIES, make_model, write_model

SAMPLED = [name for name in FAMILIES if not SUPPORT[name].engine]
REFUSED = [name for name in FAMILIES if SUPPORT[name].engine]
V1 = Version(0, 1)
LORA = {"r": 2, "alpha": 4}
LONG = EXPERTS.keys() - {"qwen3_moe", "gpt_oss"}
ROUNDING = 2e-5
"""Differences of logprobs in float32, over the order of sums; logits are of the order of 10."""


def marked(families: Iterable[str]) -> list[Any]:
    """Families as parameters: of those with experts all but two are among the long tests."""
    return [pytest.param(family, marks=pytest.mark.full) if family in LONG else family for family in families]


def sequences() -> list[np.ndarray]:
    """Alone, and groups that share a little or most of their tokens."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 97, 12)
    groups = [np.concatenate([prompt, rng.integers(3, 97, n)]) for n in (2, 5, 20)]
    return [*groups, *(rng.integers(3, 97, n) for n in (2, 9, 33))]


def score(model: PackedModel, parts: list[np.ndarray], temperature: float) -> torch.Tensor:
    """Each token's logprob after those before it, sequences end to end."""
    row = model.pack_row(parts)
    predictors = torch.from_numpy(np.concatenate([places[:-1] for places in row.places]))
    labels = torch.from_numpy(np.concatenate([part[1:] for part in parts]))
    return model.score(row, predictors, labels, torch.full((len(labels),), temperature)).logprobs


def expected_scores(model: Any, parts: list[np.ndarray], temperature: float) -> torch.Tensor:
    found = []
    for part in parts:
        logits = model(torch.from_numpy(part)[None], use_cache=False).logits[0, :-1] / temperature
        found.append(logits.log_softmax(-1).gather(-1, torch.from_numpy(part[1:])[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("family", marked(FAMILIES))
def test_a_packed_step_has_the_logprobs_and_gradients_of_plain_sequences(family: str, tmp_path: Path) -> None:
    packed = PackedModel(write_model(tmp_path, family))
    plain = load_plain(tmp_path)
    parts = sequences()
    logprobs = score(packed, parts, temperature=0.7)
    expected = expected_scores(plain, parts, temperature=0.7)
    torch.testing.assert_close(logprobs, expected, atol=ROUNDING, rtol=0)
    weights = torch.randn(len(expected))
    (logprobs @ weights).backward()
    (expected @ weights).backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in packed.named_parameters().items():
        gradient = theirs[name].grad
        if gradient is None:
            assert parameter.grad is None, name
        else:
            scale = float(gradient.abs().max())
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-4 * scale + 1e-7, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", marked(SAMPLED))
def test_the_engine_samples_with_the_logprobs_of_the_plain_model(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", 16)
    model = load_model(write_model(tmp_path, family))
    refuse_unsupported(model, 80)
    engine = Engine(model, max_model_len=80, max_running=4, max_step_tokens=24)
    text = random_prompt(random.Random(0), 60)
    params = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=0, seed=3)
    requests = [engine.submit(text[:length], params) for length in (1, 20, 60)]
    run_all(engine)
    unseeded = SamplingParams(max_tokens=6, ignore_eos=True)  # seeded requests compute their whole prompt
    repeated = [engine.submit(text[:20], params), engine.submit([*text[:40], 5], unseeded)]
    run_all(engine)
    plain = load_plain(tmp_path)
    for request in [*requests, *repeated]:
        assert_like_plain(request, plain, atol=ROUNDING)
    assert repeated[0].tokens == requests[1].tokens
    assert repeated[1].future.result().cached_tokens == 32  # whole blocks


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_the_engine_does_not_compute_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        refuse_unsupported(make_model(family), 80)
    assert SUPPORT[family].engine in str(error.value)


@pytest.mark.parametrize(
    ("family", "way"),
    [  # the link carries what files hold: a dense family and one with experts are enough of it
        *(pytest.param(name, "files", marks=pytest.mark.full if name in LONG else ()) for name in SAMPLED),
        *(
            pytest.param(name, "link", marks=() if name in ("qwen3", "qwen3_moe") else pytest.mark.full)
            for name in SAMPLED
        ),
    ],
)
def test_published_weights_reach_the_engine(family: str, way: str, tmp_path: Path) -> None:
    engine = Engine(load_model(write_model(tmp_path / "old", family)), max_model_len=64)
    new = PackedModel(write_model(tmp_path / "new", family, seed=1))
    store = WeightStore(tmp_path / "weights")
    publisher = Publisher(store, new, host="127.0.0.1" if way == "link" else None)
    publisher.check_embedded()
    publisher.publish(V1)
    engine.update_weights(store.path(V1), V1)
    assert_samples_from(engine, tmp_path / "new")
    publisher.close()


class SharingTrainer(NamedTuple):
    """A trainer in a process of its own, which shares memory with engines: files stand in for that of a GPU."""

    process: SenderProcess
    store: WeightStore
    memory: Path


@pytest.fixture(scope="module")
def sharing_trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharingTrainer]:
    root = tmp_path_factory.mktemp("sharing")
    store = WeightStore(root / "weights")
    process = SenderProcess(store.directory, "ipc", "cpu", root / "memory")
    yield SharingTrainer(process, store, root / "memory")
    process.kill()


@pytest.mark.parametrize("family", marked(SAMPLED))
def test_weights_in_shared_memory_reach_the_engine(
    family: str, sharing_trainer: SharingTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer, version = sharing_trainer, Version(0, 1 + SAMPLED.index(family))
    use(HostDriver(trainer.memory), replace=monkeypatch.setattr)
    engine = Engine(load_model(write_model(tmp_path / "old", family)), max_model_len=64)
    PackedModel(write_model(tmp_path / "new", family, seed=1)).save(tmp_path / "saved", torch.float32)
    assert trainer.process.publish(version, tmp_path / "saved" / "model.safetensors")
    engine.update_weights(trainer.store.path(version), version)
    assert_samples_from(engine, tmp_path / "new")
    engine.link.close()


ADAPTERS = [*((family, "all-linear") for family in FAMILIES), *((family, "experts") for family in EXPERTS)]


@pytest.mark.parametrize(
    ("family", "targets"), [pytest.param(*pair, marks=pytest.mark.full if pair[0] in LONG else ()) for pair in ADAPTERS]
)
def test_an_adapter_is_loaded_by_peft_and_by_the_engine(family: str, targets: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", family)
    model = PackedModel(base, lora={**LORA, "target_modules": ["all-linear", targets]})
    train_a_little(model)
    adapted = {name.split(".")[-2] for name, matrix in model.trained_tensors().items() if matrix.any()}
    assert any(layer.startswith("down_proj_lora") for layer in adapted) == (targets == "experts")
    store = WeightStore(tmp_path / "weights")
    Publisher(store, model).publish(V1)
    parts = sequences()
    with torch.no_grad():
        found = score(model, parts, 1.0)
        peft = PeftModel.from_pretrained(load_plain(base), store.path(V1)).eval()
        torch.testing.assert_close(expected_scores(peft, parts, 1.0), found, atol=ROUNDING, rtol=0)
    model.save(tmp_path / "merged", torch.float32)
    if family in SAMPLED:
        engine = Engine(load_model(base), max_model_len=64, base=base)
        engine.update_weights(store.path(V1), V1)
        assert_samples_from(engine, tmp_path / "merged")


@pytest.mark.parametrize("family", marked(FAMILIES))
def test_a_trained_model_opens_in_transformers_with_the_same_logits(family: str, tmp_path: Path) -> None:
    model = PackedModel(write_model(tmp_path / "start", family))
    train_a_little(model)
    model.save(tmp_path / "final", torch.float32)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    parts = sequences()
    with torch.no_grad():
        exported = expected_scores(load_plain(tmp_path / "final"), parts, 1.0)
        torch.testing.assert_close(exported, score(model, parts, 1.0), atol=ROUNDING, rtol=0)


def load_plain(directory: Path) -> Any:
    """The model with the attention of its own module: transformers' faster ones ignore capped scores."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def train_a_little(model: PackedModel) -> None:
    """Take a plain gradient step that moves logprobs by more than rounding."""
    parts = sequences()
    before = score(model, parts, 1.0)
    for _ in range(2):  # the first step of an adapter changes one of its factors alone
        score(model, parts, 1.0).sum().backward()
        with torch.no_grad():
            for parameter in model.named_parameters().values():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad / (parameter.grad.norm() + 1e-12)
                    parameter.grad = None
    assert (score(model, parts, 1.0) - before).abs().max() > 100 * ROUNDING


def assert_samples_from(engine: Engine, directory: Path) -> None:
    """The engine's logprobs are those of the model in `directory`, and not those of another one."""
    request = engine.submit(random_prompt(random.Random(1), 30), SamplingParams(max_tokens=4, ignore_eos=True))
    run_all(engine)
    plain = load_plain(directory)
    found = torch.tensor(request.future.result(timeout=0).logprobs)
    torch.testing.assert_close(found, plain_logprobs(plain, request.tokens)[29:], atol=2 * ROUNDING, rtol=0)
