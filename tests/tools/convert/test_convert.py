"""Run files of other systems are translated, what has no counterpart is listed, and the result trains."""

import re
from pathlib import Path

import pytest

from headrace.api.run import Run
from headrace.cli.main import main
from headrace.errors import BadInput
from headrace.runfile.explain import find
from headrace.runfile.foreign_keys import MOVED
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.tools.convert import NEEDLESS, RENAMED, TRL_HINTS, convert
from tests.end_to_end.runs import REPOSITORY, headrace

PRIME_RL = """
max_steps = 20
seq_len = 2048
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[model]
name = "Qwen/Qwen3-0.6B"
[orchestrator]
batch_size = 128
rollouts_per_example = 16
[orchestrator.concurrency]
initial_inflight = 256
[orchestrator.sampling]
max_completion_tokens = 128
[[orchestrator.env]]
id = "primeintellect/reverse-text"
[[orchestrator.env]]
name = "sort"
taskset = { id = "some-sort", turns = 2 }
harness = { id = "null" }
[trainer.optim]
lr = 3e-6
[trainer.model]
impl = "custom"
ep = 8
[ckpt]
interval = 10
[inference.parallel]
tp = 2
"""
SCRIPT = '''
import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

VOWELS = re.compile("[aeiou]")


def count(text):
    return len(VOWELS.findall(text))


def vowels(completions, **kwargs):
    """More vowels are better."""
    return [count(completion[0]["content"]) / 10 for completion in completions]


def right(completions, answer, **kwargs):
    return [float(completion[0]["content"] == gold) for completion, gold in zip(completions, answer)]


name = "x" + "y"
data = load_dataset("json", data_files="DATA", split="train")
config = GRPOConfig(
    output_dir="OUTPUT", learning_rate=1e-3, num_generations=4, max_completion_length=8, per_device_train_batch_size=8,
    gradient_accumulation_steps=2, max_steps=5, loss_type="dr_grpo", vllm_mode="colocate", run_name=name,
    logging_steps=1, reward_weights=[1.0, 0.5], report_to="none",
)
GRPOTrainer(model="MODEL", reward_funcs=[vowels, right], args=config, train_dataset=data).train()
raise SystemExit("a script that is read is not executed")
'''


def test_a_prime_rl_file_is_translated_and_unknown_keys_are_listed(tmp_path: Path):
    (tmp_path / "rl.toml").write_text(PRIME_RL)
    made = convert(tmp_path / "rl.toml")
    (tmp_path / "ours.toml").write_text(made.text())
    config, _ = load(RunConfig, [tmp_path / "ours.toml"])
    assert config.orchestrator.group_size == 16
    assert config.orchestrator.max_inflight_rollouts == 256
    assert [env.id for env in config.orchestrator.train.env] == ["reverse-text", "verifiers:some-sort"]
    assert config.orchestrator.train.sampling.max_tokens == 128
    assert config.trainer.ckpt.interval == 10
    assert (config.launch.trainer_processes, config.launch.inference_servers) == (2, 6)
    assert (config.inference.engine, config.inference.vllm.tensor_parallel_size) == ("vllm", 2)
    assert {key for key, _, _ in made.left_out} == {
        "trainer.model.impl",
        "trainer.model.ep",
        "orchestrator.train.env.1.harness",
    }
    assert made.missing == []


def test_keys_that_translate_one_to_one_are_accepted_in_place(tmp_path: Path):
    (tmp_path / "rl.toml").write_text(PRIME_RL.partition("[trainer.optim]")[0].replace("[deployment]", "[launch]"))
    text = (tmp_path / "rl.toml").read_text().replace("num_train_gpus", "trainer_processes")
    text = text.replace("num_infer_gpus", "inference_servers").replace("harness = ", "# ").replace("taskset = ", "# ")
    (tmp_path / "rl.toml").write_text(text.replace('name = "sort"', 'id = "copy"').replace("primeintellect/", ""))
    config, notices = load(RunConfig, [tmp_path / "rl.toml"], ["--output_dir=run"])
    assert config.orchestrator.group_size == 16
    assert len([notice for notice in notices if "rollouts_per_example" in notice]) == 1


def test_a_trl_script_is_read_without_being_executed(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    made = convert(tmp_path / "train.py", rewards_file="my_rewards.py")
    assert made.tree["objective"]["kwargs"] == {
        "rewards": ["my_rewards.py:vowels", "my_rewards.py:right"],
        "weights": [1.0, 0.5],
    }
    assert {key for key, _, _ in made.left_out} == {"run_name", "trainer.loss_type", "trainer.vllm_mode"}
    assert "VOWELS" in made.rewards
    assert "GRPOTrainer" not in made.rewards


def test_fields_of_grpo_config_in_yaml_are_recognized(tmp_path: Path):
    (tmp_path / "grpo.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: a/b\nreward_funcs: [exact_match_reward]\n"
        "num_generations: 4\nbeta: 0.04\nlearning_rate: 1.0e-6\nmax_steps: 5\n"
        "steps_per_generation: 3\noutput_dir: out\n"
    )
    made = convert(tmp_path / "grpo.yaml")
    assert made.tree["model"] == {"name": "Qwen/Qwen3-0.6B"}
    assert made.tree["data"]["kwargs"]["name"] == "a/b"
    assert [key for key, _, _ in made.left_out] == ["trainer.steps_per_generation"]


def test_a_file_of_neither_system_is_refused(tmp_path: Path):
    (tmp_path / "other.yaml").write_text("a: 1\n")
    with pytest.raises(BadInput) as error:
        convert(tmp_path / "other.yaml")
    assert error.value.file == tmp_path / "other.yaml"


@pytest.mark.full
def test_a_converted_trl_script_trains(tmp_path: Path, tiny_model: Path):
    rows = [f'{{"prompt": [{{"role": "user", "content": "say {word}"}}], "answer": "{word}"}}\n' for word in "abcdefgh"]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    script = SCRIPT.replace("DATA", str(tmp_path / "data.jsonl")).replace("MODEL", str(tiny_model))
    (tmp_path / "train.py").write_text(script.replace("OUTPUT", str(tmp_path / "run")))
    assert main(["convert", str(tmp_path / "train.py"), "--output", str(tmp_path / "run.yaml")]) == 0
    status, output = headrace("rl", tmp_path / "run.yaml", "--seq_len", "64")
    assert status == 0, output
    assert Run(tmp_path / "run").metrics("loss")["step"].to_pylist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("page", "column"), [("from-trl", 3), ("from-prime-rl", 2), ("from-verl", 2)])
def test_every_key_that_a_migration_page_names_exists(page: str, column: int):
    lines = (REPOSITORY / "docs" / "how-to" / f"{page}.md").read_text().splitlines()
    cells = [line.split("|")[column] for line in lines if line.startswith("| `") and line.count("|") > 2]
    keys = {key for cell in cells for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", cell)}
    assert len(keys) > 10
    assert [key for key in sorted(keys) if not find(RunConfig, key)] == []


def test_the_migration_pages_list_every_key_that_is_renamed_or_left_out():
    prime_rl, trl = (
        {tuple(cell.strip().strip("`") for cell in line.strip("|").split("|")) for line in page.splitlines()}
        for page in ((REPOSITORY / "docs" / "how-to" / f"from-{name}.md").read_text() for name in ("prime-rl", "trl"))
    )
    assert {(*pair, "yes") for pair in MOVED.items()} | {(*pair, "") for pair in RENAMED.items()} <= prime_rl
    assert set(NEEDLESS.items()) <= prime_rl
    assert set(TRL_HINTS.items()) <= trl
