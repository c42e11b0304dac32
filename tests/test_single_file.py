"""The GRPO of examples/single-file: it runs, it learns from what it sampled, and its gradient is the trainer's."""

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from headrace.environments.registry import load_environment
from headrace.rollout.packing import pack
from headrace.rollout.types import Rollout, Sample, Task, Turn
from headrace.trainer.losses import policy_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.step import TrainStep
from tests.trainer.training_samples import Gradients

FILE = Path(__file__).parents[1] / "examples" / "single-file" / "grpo.py"
SEQ_LEN = 64
TEMPERATURE = 0.7
LONGEST = 9


@pytest.fixture(scope="module")
def grpo() -> ModuleType:
    specification = importlib.util.spec_from_file_location("single_file_grpo", FILE)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(grpo: ModuleType, tiny_model: Path) -> torch.nn.Module:
    return grpo.load_policy(tiny_model, grpo.RENDERER, SEQ_LEN)[0]


@pytest.fixture(scope="module")
def groups(grpo: ModuleType, tiny_model: Path) -> list[list[Rollout]]:
    """Four replies of a random model to each of three words."""
    torch.manual_seed(0)
    model, prompter, _ = grpo.load_policy(tiny_model, grpo.RENDERER, SEQ_LEN)
    tasks = [Task("reverse-text", {"word": word}) for word in ("river", "mill", "headrace")]
    return asyncio.run(grpo.play(load_environment("reverse-text", {}), tasks, 4, model, prompter, TEMPERATURE, LONGEST))


def drifted(samples: list[Sample]) -> list[Sample]:
    """The same samples as if another policy had drawn them: ratios differ from 1, and some are masked."""
    rng = np.random.default_rng(0)
    for sample in samples:
        sample.logprobs = np.where(sample.mask, sample.logprobs + rng.normal(size=len(sample)), 0.0).astype(np.float32)
        sample.logprobs[-1] = np.log(0.5)  # far from a random model's 1 in 320: beyond the mask where A < 0
    return samples


def test_two_steps_from_the_command_line_change_the_parameters_and_save_a_model(
    grpo: ModuleType, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = f"--model {tiny_model} --steps 2 --prompts 3 --group-size 4 --max-tokens 6 --updates 2 --output {tmp_path}"
    held_out = '{"split": "eval", "num_tasks": 4}'
    grpo.main(grpo.arguments([*words.split(), "--eval-args", held_out]))
    output = capsys.readouterr().out
    assert output.count("reward") == 3 and "step   2" in output and "held-out reward" in output
    before, _, _ = grpo.load_policy(tiny_model, grpo.RENDERER, SEQ_LEN)
    after, prompter, _ = grpo.load_policy(tmp_path, grpo.RENDERER, SEQ_LEN)  # a whole directory, tokenizer and all
    assert prompter.tokenizer.chat_template
    moved = [float((a - b).detach().abs().max()) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(0 < distance < 0.01 for distance in moved)


@pytest.mark.parametrize("kind", ["default", "gspo"])
def test_the_gradient_is_that_of_the_trainer(
    grpo: ModuleType, model: torch.nn.Module, groups: list[list[Rollout]], tiny_model: Path, kind: str
):
    rng = np.random.default_rng(1)
    rewarded = [[Rollout(reward=rng.random(), turns=rollout.turns) for rollout in group] for group in groups]
    samples = drifted(grpo.credit(rewarded))
    assert len(samples) == 12
    model.zero_grad()
    loss = grpo.backward(model, samples, policy_loss(kind), SEQ_LEN, at_once=2)

    packed = PackedModel(tiny_model, lm_head_chunk=64)
    optimizer = Gradients(packed.named_parameters())
    result = TrainStep(packed, optimizer, {"rl": policy_loss(kind)}).run(pack(samples, SEQ_LEN), 1.0)
    assert result is not None
    clipped = result.metrics["is_masked" if kind == "default" else "is_clipped"]
    assert 0 < clipped < 1  # the loss is not the plain policy gradient here
    assert loss == pytest.approx(result.metrics["loss"], rel=1e-5)
    assert optimizer.kept.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - optimizer.kept[name]).abs().max() <= 1e-5 * optimizer.kept[name].abs().max(), name


def test_sampler_and_loss_agree_on_the_probability_of_every_token(model: torch.nn.Module, groups: list[list[Rollout]]):
    for turn in (rollout.turns[0] for group in groups for rollout in group):
        ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.completion_ids])).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(turn.prompt_ids) - 1 : -1]  # alone, without padding or cache
        alone = (logits / TEMPERATURE).log_softmax(-1).gather(-1, ids[len(turn.prompt_ids) :, None])[:, 0]
        assert turn.temperature == TEMPERATURE
        assert turn.logprobs.tolist() == pytest.approx(alone.tolist(), abs=1e-4)


def test_replies_end_with_a_stop_token_or_at_their_limit(
    grpo: ModuleType, model: torch.nn.Module, groups: list[list[Rollout]]
):
    assert all(len(rollout.turns[0].completion_ids) <= LONGEST for group in groups for rollout in group)
    [(free, _)] = grpo.sample(model, [[5, 6, 7]], [8], set(), 0.0)
    assert len(free) == 8
    stop, first = free[3], free.index(free[3])
    both = grpo.sample(
        model, [[5, 6, 7], [9]], [8, 2], {stop}, 0.0
    )  # beside a shorter one, which padding must not change
    assert both[0][0] == free[: first + 1]
    assert len(both[1][0]) <= 2


def test_credit_is_the_reward_minus_the_mean_of_the_group_on_sampled_tokens_alone(grpo: ModuleType):
    def rollout(reward: float) -> Rollout:
        turn = Turn(np.array([1, 2]), np.array([3, 4]), np.zeros(2), np.zeros(2), 1.0)
        return Rollout(reward=reward, turns=[turn])

    samples = grpo.credit([[rollout(1.0), rollout(0.0)], [rollout(0.5), rollout(0.5)]])
    assert [sample.streams["advantages"].tolist() for sample in samples] == [[0, 0, 0.5, 0.5], [0, 0, -0.5, -0.5]]
    samples = grpo.credit([[rollout(1.0), rollout(0.0)]], std=True)  # its standard deviation is 0.5
    assert samples[0].streams["advantages"].tolist() == pytest.approx([0, 0, 1, 1], abs=1e-5)


def test_the_file_is_short_enough_to_be_read_at_once():
    assert len(FILE.read_text().splitlines()) <= 330
