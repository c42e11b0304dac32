"""New weights in a running engine: taken whole, or refused before anything changed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.inference.backend import EngineError
from headrace.inference.embedded import scheduler as scheduler_module
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.published import model_files
from headrace.inference.weights.reading import WeightsError
from headrace.rollout.version import Version
from headrace.transport.weights import WeightStore
from tests.inference.plain_forward import (
    assert_close,
    assert_like_plain,
    kept_logprobs,
    plain_logprobs,
    random_prompt,
    run_all,
    weights_of,
)

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
    for request in requests:
        assert request.future.result().version_spans == [(V0, 0, 4), (V1, 4, 10)]
        assert_close(request.future.result().logprobs, kept_logprobs({V0: old, V1: new}, request))


def ask(engine: Engine, prompt: list[int], **params: Any) -> Any:
    request = engine.submit(prompt, SamplingParams(max_tokens=2, ignore_eos=True, **params))
    run_all(engine)
    return request


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_no_block_of_old_weights_is_ever_found(make_model: MakeModel, kv_on_update: Any) -> None:
    engine = Engine(make_model(0), max_model_len=128, kv_on_update=kv_on_update)
    prompt = random_prompt(random.Random(0), 50)
    for step in range(4):
        version, model = Version(0, step), make_model(step)
        if step:
            engine.install(weights_of(model, version))
        before = engine.state().tokens_cached
        first, second = ask(engine, prompt), ask(engine, prompt)
        assert [request.future.result().cached_tokens for request in (first, second)] == [0, 48]
        assert engine.state().tokens_cached == before + 48
        for request in (first, second):
            assert_like_plain(request, {version: model})


def test_the_same_version_with_other_weights_finds_nothing_of_the_old(make_model: MakeModel) -> None:
    engine = Engine(make_model(0), max_model_len=128, max_step_tokens=16)
    prompt = random_prompt(random.Random(0), 50)
    engine.install(weights_of(make_model(1), V1))
    ask(engine, prompt)
    engine.install(weights_of(make_model(2), V1))
    later = ask(engine, prompt)
    assert later.future.result().cached_tokens == 0
    assert_like_plain(later, {V1: make_model(2)})


def test_partial_prompt_logprobs_restart_with_other_weights_of_the_same_version(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", 16)
    engine = Engine(make_model(0), max_model_len=128, max_step_tokens=16)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    request = engine.submit(random_prompt(random.Random(0), 50), params)
    engine.step()
    assert request.computed == 16
    engine.install(weights_of(make_model(1), V0))
    run_all(engine)
    assert_like_plain(request, {V0: make_model(1)})


def test_kept_blocks_are_not_found_when_their_version_returns(make_model: MakeModel) -> None:
    models = {V0: make_model(0), V1: make_model(1)}
    engine = Engine(make_model(0), max_model_len=128, kv_on_update="keep")
    kept = engine.submit(random_prompt(random.Random(0), 10), SamplingParams(max_tokens=60, ignore_eos=True))
    engine.step()
    engine.step()
    for version in (V1, V0):
        engine.install(weights_of(models[version], version))
        for _ in range(25):
            engine.step()
    run_all(engine)
    assert [span[0] for span in kept.future.result().version_spans] == [V0, V1, V0]
    assert_close(kept.future.result().logprobs, kept_logprobs(models, kept))
    assert_like_plain(ask(engine, kept.tokens), {V0: make_model(0)})


def test_a_kept_request_that_loses_its_blocks_goes_on_with_the_weights_of_the_moment(make_model: MakeModel) -> None:
    models = {V0: make_model(0), V1: make_model(1)}
    engine = Engine(make_model(0), max_model_len=64, kv_blocks=4, kv_on_update="keep")
    rng = random.Random(0)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = (engine.submit(random_prompt(rng, 30), params) for _ in range(2))
    engine.step()
    engine.step()
    engine.install(weights_of(models[V1], V1))
    run_all(engine)
    assert engine.scheduler.preemptions == 1
    assert_close(first.future.result().logprobs, kept_logprobs(models, first))
    # The second sampled three tokens, one of them with the kept cache, and the rest after recomputation.
    spans = second.future.result().version_spans
    assert (spans[0], {span[0] for span in spans[1:]}) == ((V0, 0, 2), {V1})
    assert_close(second.future.result().logprobs[:3], kept_logprobs(models, second)[:3])
    plain = plain_logprobs(models[V1], second.tokens)[second.prompt_length - 1 :]
    assert_close(second.future.result().logprobs[3:], plain[3:])


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_a_partly_computed_prompt_is_recomputed(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, kv_on_update: Any
) -> None:
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", 16)
    engine = Engine(make_model(0), max_model_len=128, max_step_tokens=16, kv_on_update=kv_on_update)
    request = engine.submit(random_prompt(random.Random(0), 50), SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    assert request.computed == 16
    engine.install(weights_of(make_model(1), V1))
    run_all(engine)
    assert request.future.result().version_spans == [(V1, 0, 4)]
    assert_like_plain(request, {V1: make_model(1)})


@pytest.mark.parametrize("leaves", [True, False])
def test_nan_of_a_partly_computed_prompt_does_not_spread(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", 16)
    broken = make_model(0)
    with torch.no_grad():
        broken.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    engine = Engine(broken, max_model_len=128, max_step_tokens=16, kv_blocks=8, max_running=1)
    rng = random.Random(0)
    begun = engine.submit(random_prompt(rng, 90), SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    if leaves:
        engine.cancel(begun)
    engine.install(weights_of(make_model(1), V1))
    later = [ask(engine, random_prompt(rng, 113 + length)) for length in range(4)]  # which take every block
    for request in later if leaves else (begun, *later):
        assert_like_plain(request, {V1: make_model(1)})


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
    "missing": (lambda tensors: tensors.__delitem__(NORM), NORM),
    "reshaped": (lambda tensors: tensors.update({NORM: torch.ones(7)}), rf"{NORM}.*\[7\].*\[32\]"),
    "unknown": (lambda tensors: tensors.update({"extra": torch.ones(1)}), "extra"),
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
    with pytest.raises(WeightsError, match=r"0-1.*0-2"):
        engine.update_weights(directory, V2)
    with pytest.raises(WeightsError, match=r"COMPLETE\.json"):
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
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        Engine(make_model(0), max_model_len=64).update_weights(directory, V1)


@pytest.mark.parametrize("content", ["{", "{}"])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
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
        with pytest.raises(EngineError, match="0-1"):
            request.future.result(timeout=0)
    engine.update_weights(publish(make_model(2), V2), V2)
    later = start_requests(engine)
    run_all(engine)
    for request in later:
        assert_like_plain(request, make_model(2))


@pytest.mark.parametrize("length", [14, 15, 16, 17])
def test_a_group_that_samples_alike_shares_nothing_stale_when_recomputed(make_model: MakeModel, length: int) -> None:
    """All but the newest token of some may then come out of blocks that are written in the same step."""
    models = {V0: make_model(0), V1: make_model(1)}
    engine = Engine(make_model(0), max_model_len=64)
    prompt = random_prompt(random.Random(length), length)
    group = [engine.submit(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)) for _ in range(3)]
    engine.step()
    engine.install(weights_of(models[V1], V1))
    run_all(engine)
    for request in group:
        assert request.future.result().version_spans == [(V0, 0, 1), (V1, 1, 8)]
        assert_like_plain(request, models)


def test_blocks_of_a_recomputed_kept_request_are_of_the_new_weights(make_model: MakeModel) -> None:
    """After a failed step all requests are recomputed with the current weights, under their version."""
    models = {V0: make_model(0), V1: make_model(1), V2: make_model(2)}
    engine = Engine(make_model(0), max_model_len=64, kv_on_update="keep")
    prompt = random_prompt(random.Random(5), 40)
    requests = [engine.submit(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)) for _ in range(2)]
    engine.step()
    engine.install(weights_of(models[V1], V1))
    engine.scheduler.isolate([*requests], engine._weights)
    engine.step()
    engine.install(weights_of(models[V2], V2))
    late = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=2))
    run_all(engine)
    assert_like_plain(late, models[V2])
    for request in requests:
        versions = [version for version, _, _ in request.future.result().version_spans]
        assert versions == sorted(set(versions))


def test_requests_without_a_row_of_the_window_are_exact_too(make_model: MakeModel) -> None:
    engine = Engine(make_model(0), max_model_len=200, kv_blocks=14, compile=False)
    rng = random.Random(3)
    requests = [engine.submit(random_prompt(rng, 20), SamplingParams(max_tokens=12, ignore_eos=True)) for _ in range(6)]
    run_all(engine)
    assert not engine.runner.window.buckets  # the whole cache has less than eight of the shortest rows, twice over
    for request in requests:
        assert_like_plain(request, make_model(0))
