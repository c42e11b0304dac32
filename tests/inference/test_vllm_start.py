"""vLLM's command line and environment, and what is read from a model's files."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.inference.vllm import child
from headrace.inference.vllm.start import (
    MIN_CACHE_BYTES,
    ModelFacts,
    arguments,
    cache_bytes,
    check_arguments,
    environment,
    read_facts,
)
from tests.refusals import refused

FACTS = ModelFacts(100, frozenset(), 2048, 1 << 20)


def command(*, on_gpu: bool, **settings: Any) -> dict[str, str | None]:
    """The arguments by name; those of flags are None."""
    config = InferenceConfig(engine="vllm", **settings)
    words = arguments(config, Path("/models/m"), Path("/tmp/s"), 256, 1 << 30, on_gpu=on_gpu)
    found: dict[str, str | None] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if following.startswith("--") else following
    return found


def test_a_cpu_computes_in_float32_without_compiling() -> None:
    found = command(on_gpu=False, max_running=7, seed=3)
    assert found["--dtype"] == "float32" and "--enforce-eager" in found
    assert (found["--max-num-seqs"], found["--seed"], found["--max-model-len"]) == ("7", "3", "256")
    assert (found["--kv-cache-memory-bytes"], found["--uds"]) == (str(1 << 30), "/tmp/s")
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert not {"--gpu-memory-utilization", "--tensor-parallel-size", "--enable-lora", "--api-key"} & found.keys()


def test_gpu_options_follow_the_configuration() -> None:
    vllm = {"tensor_parallel_size": 2, "data_parallel_size": 4, "gpu_memory_utilization": 0.7, "max_lora_rank": 20}
    found = command(on_gpu=True, vllm={**vllm, "args": ["--block-size", "32"]}, prefix_cache=False)
    assert found["--dtype"] == "bfloat16" and "--enforce-eager" not in found
    assert (found["--tensor-parallel-size"], found["--data-parallel-size"]) == ("2", "4")
    assert (found["--gpu-memory-utilization"], found["--block-size"]) == ("0.7", "32")
    assert (found["--max-lora-rank"], found["--max-loras"]) == ("32", "4") and "--enable-lora" in found
    assert "--no-enable-prefix-caching" in found and "--enable-expert-parallel" not in found
    assert "--enable-expert-parallel" in command(on_gpu=True, vllm={**vllm, "expert_parallel": True})


def test_keys_and_our_own_packages_stay_with_us() -> None:
    config = InferenceConfig(engine="vllm", vllm={"env": {"MORE": "1", "HF_HUB_OFFLINE": "0"}}, admin_key_var="MASTER")
    ours = {"HEADRACE_API_KEY": "a", "MASTER": "b", "VLLM_API_KEY": "c", "PYTHONPATH": "/ours", "HOME": "/h"}
    found = environment(ours, config, Path("/room"), on_gpu=True)
    assert not {"a", "b", "c", "/ours"} & set(found.values())
    assert (found["PYTHONPATH"], found["HOME"], found["MORE"], found["HF_HUB_OFFLINE"]) == ("/room", "/h", "1", "0")
    assert "TORCH_COMPILE_DISABLE" not in found and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in found
    assert environment(ours, config, Path("/room"), on_gpu=False)["TORCH_COMPILE_DISABLE"] == "1"


@pytest.mark.parametrize("argument", ["--port", "--logprobs-mode=raw_logprobs", "--speculative_config"])
def test_arguments_that_would_break_the_contract_are_refused(argument: str) -> None:
    with refused(ConfigError, key="inference.vllm.args"):
        check_arguments(["--block-size", "16", argument])


def test_the_cache_has_room_for_the_longest_requests_or_a_quarter_of_what_is_free() -> None:
    four, one = (InferenceConfig(engine="vllm", max_running=number) for number in (4, 1))
    assert cache_bytes(four, FACTS, 200, 1 << 40) == 4 * 256 << 20
    assert cache_bytes(four, FACTS, 200, 1 << 30) == 1 << 28
    assert cache_bytes(one, FACTS, 1, 1 << 20) == MIN_CACHE_BYTES
    config = InferenceConfig(engine="vllm", kv_cache_gb=0.5)
    assert cache_bytes(config, FACTS, 256, None) == 1 << 29
    assert cache_bytes(InferenceConfig(engine="vllm"), FACTS, 256, None) is None


def test_what_a_models_files_say(tmp_path: Path) -> None:
    config = {
        "vocab_size": 50, "eos_token_id": 1, "max_position_embeddings": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    facts = read_facts(tmp_path, 9, None)
    assert facts == ModelFacts(50, frozenset({1, 2, 3, 9}), 64, 4 * 2 * 2 * 2 * 8)
    (tmp_path / "config.json").write_text("{}")
    with refused(file=tmp_path / "config.json"):
        read_facts(tmp_path)


@pytest.mark.parametrize(("rank", "allowed"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_a_rank_is_rounded_up_to_one_that_vllm_has(rank: int, allowed: int) -> None:
    config = InferenceConfig(engine="vllm", vllm={"max_lora_rank": rank})
    words = arguments(config, Path("model"), Path("socket"), 64, None, on_gpu=False)
    assert words[words.index("--max-lora-rank") + 1] == str(allowed)


def test_each_version_of_vllm_is_asked_for_what_it_does_not_give_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    for name, flags, routes, argument, runner in [
        ("old", "tokens_only", '"/pause"', False, "0"),
        ("new", "enable_scale_out: bool", '"/update_weight_version"', True, None),
    ]:
        rooms = tmp_path / name / "entrypoints" / "somewhere"
        rooms.mkdir(parents=True)
        (rooms / "cli_args.py").write_text(flags)
        (rooms / "api_router.py").write_text(routes)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["child"])
            patch.setattr("os.environ", variables := {})
            child.adapt(tmp_path / name)
            assert ("--enable-scale-out" in sys.argv) == argument
            assert variables.get("VLLM_USE_V2_MODEL_RUNNER") == runner


def test_an_interpreter_without_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lifeline, other_end = os.pipe()
    monkeypatch.setattr(sys, "argv", ["child", str(lifeline), "room"])
    monkeypatch.setattr(child, "end_with", lambda *_: None)
    with pytest.raises(SystemExit, match=r"inference\.vllm\.python"):
        child.main()
    os.close(lifeline)
    os.close(other_end)
