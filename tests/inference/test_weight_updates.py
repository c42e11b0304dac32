"""New weights in a running engine: taken whole, or refused before anything changed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import EngineError
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.published import WeightsError, model_files
from headrace.rollout.version import Version
from headrace.transport.weights import WeightStore
from tests.inference.plain_forward import assert_like_plain, run_all

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
Publish = Callable[[Any, Version], Path]
MakeModel = Callable[[int], Any]


def start_requests(engine: Engine, steps: int = 4) -> list[Any]:
    rng = random.Random(0)
    requests = [
        engine.submit([rng.randrange(3, 97) for _ in range(length)], SamplingParams(max_tokens=10, ignore_eos=True))
        for length in (1, 4, 20)
    ]
    for _ in range(steps):
        engine.step()
    return requests


def test_tokens_after_an_update_come_from_the_new_weights_over_a_recomputed_prefix(
    make_model: MakeModel, publish: Publish
) -> None:
    models = {V0: make_model(0), V1: make_model(1)}
    engine = Engine(make_model(0), max_model_len=64)
    requests = start_requests(engine)
    engine.update_weights(publish(models[V1], V1), V1)
    run_all(engine)
    for request in requests:
        assert request.future.result().version_spans == [(V0, 0, 4), (V1, 4, 10)]
        assert_like_plain(request, models)


def test_kept_keys_and_values_are_those_of_the_old_weights(make_model: MakeModel, publish: Publish) -> None:
    old, new = make_model(0), make_model(1)
    engine = Engine(make_model(0), max_model_len=64, kv_on_update="keep")
    requests = start_requests(engine)
    engine.update_weights(publish(new, V1), V1)
    late = engine.submit(requests[2].tokens[:20], SamplingParams(max_tokens=3))
    run_all(engine)
    assert_like_plain(late, new)  # the same prompt as a running one, but not its stale keys
    request = requests[2]
    with torch.no_grad():
        cache = old(input_ids=torch.tensor([request.tokens[:23]]), use_cache=True).past_key_values
        logits = new(input_ids=torch.tensor([request.tokens[23:-1]]), past_key_values=cache).logits[0]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(request.tokens[24:])[:, None])[:, 0]
    sampled = torch.tensor(request.future.result().logprobs[4:])
    torch.testing.assert_close(sampled, expected, atol=1e-5, rtol=0)


def test_two_updates_between_steps_leave_one_span(make_model: MakeModel, publish: Publish) -> None:
    engine = Engine(make_model(0), max_model_len=64)
    [request, *_] = start_requests(engine)
    for step in (1, 2):
        engine.update_weights(publish(make_model(step), Version(0, step)), Version(0, step))
    run_all(engine)
    assert request.future.result().version_spans == [(V0, 0, 4), (V2, 4, 10)]


def test_a_rewound_lineage_is_accepted(make_model: MakeModel, publish: Publish) -> None:
    engine = Engine(make_model(0), max_model_len=64)
    for version in (Version(0, 5), Version(1, 3)):
        engine.update_weights(publish(make_model(version.step), version), version)
    assert engine.version == Version(1, 3)


def test_tied_embeddings_may_be_stored_once(make_model: MakeModel, publish: Publish) -> None:
    directory = publish(make_model(1), V1)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    engine = Engine(make_model(0), max_model_len=64)
    engine.update_weights(directory, V1)
    [request, *_] = start_requests(engine)
    run_all(engine)
    assert_like_plain(request, make_model(1))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """A writer of the directory's tensors, changed."""

    def write(target: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, target / "model.safetensors")

    return write


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "missing": (lambda tensors: tensors.__delitem__(NORM), f"missing: {NORM}"),
    "reshaped": (lambda tensors: tensors.update({NORM: torch.ones(7)}), rf"{NORM} is \[7\], not \[32\]"),
    "unknown": (lambda tensors: tensors.update({"extra": torch.ones(1)}), "does not have: extra"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_tensors_that_do_not_fit_are_refused_before_anything_changes(
    make_model: MakeModel, publish: Publish, tmp_path: Path, damage: str
) -> None:
    edit, message = DAMAGES[damage]
    store = WeightStore(tmp_path / "edited")
    store.publish(V1, edit_tensors(publish(make_model(1), V1), edit))
    engine = Engine(make_model(0), max_model_len=64)
    requests = start_requests(engine)
    with pytest.raises(WeightsError, match=message):
        engine.update_weights(store.path(V1), V1)
    run_all(engine)
    for request in requests:
        assert_like_plain(request, {V0: make_model(0)})


def test_directories_that_are_not_the_version_asked_for_are_refused(
    make_model: MakeModel, publish: Publish, tmp_path: Path
) -> None:
    engine = Engine(make_model(0), max_model_len=64)
    directory = publish(make_model(1), V1)
    with pytest.raises(WeightsError, match="holds version 0-1, but 0-2 was asked for"):
        engine.update_weights(directory, V2)
    with pytest.raises(WeightsError, match=r"has no COMPLETE\.json"):
        engine.update_weights(tmp_path, V1)
    with open(directory / "model.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x00\x01\x02\x03")
    with pytest.raises(WeightsError, match="damaged"):
        engine.update_weights(directory, V1)
    assert engine.version == V0


def test_files_that_are_gone_before_they_are_read_are_refused(make_model: MakeModel, publish: Publish) -> None:
    directory = publish(make_model(1), V1)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("retired")  # listed, and gone when it is opened
    with pytest.raises(WeightsError, match=r"No such file.*model\.safetensors"):
        Engine(make_model(0), max_model_len=64).update_weights(directory, V1)


@pytest.mark.parametrize("content", ["{", "{}"])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json: "):
        model_files(tmp_path)


def test_weights_that_are_not_finite_cost_their_requests_and_poison_nothing_later(
    make_model: MakeModel, publish: Publish
) -> None:
    engine = Engine(make_model(0), max_model_len=64, max_running=4)
    requests = start_requests(engine)
    broken = make_model(1)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
        broken.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    engine.update_weights(publish(broken, V1), V1)
    run_all(engine)
    for request in requests:
        with pytest.raises(EngineError, match=r"0-1.*not finite"):
            request.future.result(timeout=0)
    engine.update_weights(publish(make_model(2), V2), V2)
    later = start_requests(engine)
    run_all(engine)
    for request in later:
        assert_like_plain(request, make_model(2))
