"""One optimizer step: which token is trained by which prediction, and what does not change the gradient."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.errors import Failure
from headrace.observe.histograms import count, decode
from headrace.rollout.packing import pack
from headrace.rollout.types import Sample
from headrace.trainer.loss import ce_loss, k2_loss, k3_loss, ref_kl_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.trainer.step import StepResult, TrainStep
from headrace.trainer.tokens import StepTokens
from tests.trainer.losses import default_loss
from tests.trainer.training_samples import ARCHITECTURES, Gradients, make_sample, random_samples, write_random_model

CPU = torch.device("cpu")
LOSSES = {"rl": default_loss, "ce": ce_loss, "ref_kl": ref_kl_loss, "k2": k2_loss, "k3": k3_loss}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), ARCHITECTURES["qwen3"])


def run(
    directory: Path,
    samples: list[Sample],
    seq_len: int = 32,
    micro_batch_tokens: int = 16384,
    envs: tuple[str, ...] = (),
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    model = PackedModel(directory, lm_head_chunk=7)
    optimizer = Gradients(model.named_parameters())
    step = TrainStep(model, optimizer, LOSSES, micro_batch_tokens)
    result = step.run(pack(samples, seq_len), lr=1.0, envs=envs)
    assert result is not None
    return result, optimizer.kept


def plain_logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """t[j] of every token j of one sequence alone, by transformers' own code; t[0] does not exist and is 0."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    logits = model(ids[None]).logits[0, :-1] / sample.temperature
    return torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]])


def assert_same(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(given[name], gradient, atol=1e-5 * float(gradient.abs().max()) + 1e-8, rtol=1e-3)


def test_rl_gradient_is_that_of_the_formula_on_each_sequence_alone(directory: Path):
    samples = random_samples(seed=3, count=9)
    result, gradients = run(directory, samples)
    model = AutoModelForCausalLM.from_pretrained(directory)
    total, members = torch.zeros(()), sum(int(sample.mask.sum()) for sample in samples)
    for sample in samples:
        log_ratio = plain_logprobs(model, sample) - torch.from_numpy(sample.logprobs)
        difference = (log_ratio + torch.from_numpy(sample.logprobs)).detach().exp() - torch.from_numpy(
            sample.logprobs
        ).exp()
        advantages, mask = torch.from_numpy(sample.streams["advantages"]), torch.from_numpy(sample.mask)
        keep = ~torch.where(advantages > 0, difference > 0.2, difference < -0.2)
        per_token = -(keep * advantages) * log_ratio.exp() + 1e-3 * log_ratio**2
        total = total + per_token[mask].sum() / members
    total.backward()
    assert result.metrics["loss"] == pytest.approx(total.item(), rel=1e-4)
    assert result.tokens == sum(map(len, samples))
    assert_same(gradients, {name: parameter.grad for name, parameter in model.named_parameters()})


@pytest.mark.parametrize("micro_batch_tokens", [16384, 16])
def test_the_histogram_has_the_ratio_of_every_trained_token(directory: Path, micro_batch_tokens: int):
    samples = random_samples(seed=3, count=9)
    result, _ = run(directory, samples, micro_batch_tokens=micro_batch_tokens)
    model = AutoModelForCausalLM.from_pretrained(directory)
    logprobs = [plain_logprobs(model, sample).detach().numpy() for sample in samples]
    ratios = [np.exp(t - s.logprobs)[s.mask] for t, s in zip(logprobs, samples, strict=True)]
    expected, recorded = count("ratio", np.concatenate(ratios)), decode("ratio", result.histograms["histogram/ratio"])
    assert recorded.counts.tolist() == expected.counts.tolist()
    assert recorded.total == pytest.approx(expected.total, rel=1e-4)


def test_components_are_divided_by_their_own_member_counts_and_add_up(directory: Path):
    cross_entropy = make_sample([5, 6, 7, 8], 1, rl_weights=[0] * 4, ce_weights=[0, 1, 0.5, 0])
    policy = make_sample([9, 10, 11, 12, 13], 2, advantages=[0, 0, 1, -1, 2], rl_weights=[1, 1, 1, 0, 0.1])
    reference = make_sample([5, 20, 21], 1, rl_weights=[0] * 3, ref_kl_weights=[0, 1, 1], ref_logprobs=[0, -1, -2])
    both = make_sample([5, 20, 22], 2, advantages=[0, 0, 1], ce_weights=[0, 0, 0.1])
    result, gradients = run(directory, [cross_entropy, policy, reference, both])
    model = AutoModelForCausalLM.from_pretrained(directory)
    t = [plain_logprobs(model, sample) for sample in (cross_entropy, policy, reference, both)]

    def ratio_loss(logprob: torch.Tensor, credit: torch.Tensor | float) -> torch.Tensor:
        return (
            -credit * (logprob + 0.7).exp() + 1e-3 * (logprob + 0.7) ** 2
        )  # none of these is masked at random weights

    rl = ratio_loss(t[1][2], 1.0) + 0.1 * ratio_loss(t[1][4], 2.0) + ratio_loss(t[3][2], 1.0)
    ce = -t[0][1] - 0.5 * t[0][2] - 0.1 * t[3][2]
    credit = torch.tensor([-1.0, -2.0]) - t[2][1:].detach()
    kept = t[2][1:].detach().exp() - float(np.exp(np.float32(-0.7))) >= -0.2
    ref_kl = ratio_loss(t[2][1:], credit * kept).sum()
    total = rl / 3 + ce / 3 + ref_kl / 2
    total.backward()
    assert result.metrics["loss"] == pytest.approx(total.item(), rel=1e-4)
    assert_same(gradients, {name: parameter.grad for name, parameter in model.named_parameters()})


@pytest.mark.parametrize(("seq_len", "micro_batch_tokens"), [(20, 20), (32, 40), (64, 1)])
def test_how_the_step_is_cut_does_not_change_the_gradient(directory: Path, seq_len: int, micro_batch_tokens: int):
    samples = random_samples(seed=4, count=12)
    whole, expected = run(directory, samples, seq_len=64)
    cut, gradients = run(directory, samples, seq_len, micro_batch_tokens)
    assert cut.computed_tokens > whole.computed_tokens  # fewer prefixes are shared
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-4, abs=1e-6)
    assert_same(gradients, expected)


def test_a_prompt_that_a_group_shares_takes_little_of_a_row():
    samples = [
        make_sample([*range(10, 90), *[100 + number] * 20], prompt=80, advantages=[1.0] * 100) for number in range(8)
    ]
    tokens = StepTokens(pack(samples, 100))
    assert [len(group) for group in tokens.cut(190)] == [4, 4]  # 100 tokens, then 20 and an eighth of 80 for each
    assert [len(group) for group in tokens.cut(189)] == [3, 3, 2]


def test_tokens_that_are_scored_take_their_place_though_they_are_shared():
    samples = [make_sample([*range(10, 30)], prompt=4, advantages=[1.0] * 20) for _ in range(3)]
    assert [len(group) for group in StepTokens(pack(samples, 20)).cut(36)] == [2, 1]  # 20, then 16 that are scored


def test_first_token_of_a_sequence_is_never_a_member():
    first = make_sample([1, 2], 0, advantages=[1, 1], ce_weights=[1, 1], ref_kl_weights=[1, 0], ref_logprobs=[0, 0])
    second = make_sample([3], 0, advantages=[1])
    tokens = StepTokens(pack([first, second], 8))
    assert [tokens.count(component) for component in ("rl", "ce", "ref_kl")] == [1, 1, 0]
    assert tokens.token_ids[tokens.scored].tolist() == [2]


def test_last_token_of_one_sequence_does_not_predict_the_first_of_the_next(directory: Path):
    samples = [make_sample([1, 2, 3], 2, advantages=[0, 0, 1]), make_sample([4, 5, 6], 0, advantages=[1, 1, 1])]
    _, gradients = run(directory, samples, seq_len=6)
    _, apart = run(directory, samples, seq_len=3, micro_batch_tokens=1)
    assert_same(gradients, apart)


def test_membership_follows_masks_and_weights():
    observed = make_sample([1, 2, 3, 4], 3, advantages=[0] * 4, ce_weights=[0, 1, 0, 0])  # an observation trains by ce
    plain = make_sample([1, 2, 3], 1, advantages=[0, 1, 1])  # no weight stream: 1 on the mask
    dropped = make_sample([5, 6, 7], 1, advantages=[0, 1, 1], rl_weights=[1, 0, -2])
    tokens = StepTokens(pack([observed, plain, dropped], 4))
    assert tokens.count("rl") == 1 + 2 + 1
    assert tokens.count("ce") == 1
    assert tokens.count("ref_kl") == 0


def test_a_step_without_members_runs_backward_with_zero_gradients(directory: Path):
    samples = [make_sample([1, 2, 3], 1, advantages=[0, 1, 1], rl_weights=[0, 0, 0])]
    result, gradients = run(directory, samples)
    assert result.metrics["loss"] == 0.0
    assert all(not gradient.any() for gradient in gradients.values())
    assert gradients.keys() == PackedModel(directory).named_parameters().keys()


def test_reference_weights_without_reference_logprobs_are_an_error():
    sample = make_sample([1, 2], 1, rl_weights=[0, 0], ref_kl_weights=[0, 1])
    with pytest.raises(ValueError, match="opd, opsd"):
        StepTokens(pack([sample], 4))


def test_temperature_divides_the_logits_of_its_own_sequence(directory: Path):
    hot, cold = (make_sample([1, 2, 3], 1, temperature=t, rl_weights=[0] * 3, ce_weights=[0, 1, 1]) for t in (2.0, 0.5))
    model = AutoModelForCausalLM.from_pretrained(directory)
    expected = -torch.cat([plain_logprobs(model, hot)[1:], plain_logprobs(model, cold)[1:]]).mean()
    result, _ = run(directory, [hot, cold])
    assert result.computed_tokens == 2  # the same tokens: the logits are computed once and divided twice
    assert result.metrics["ce/nll"] == pytest.approx(expected.item(), rel=1e-5)


def test_metrics_are_split_by_environment(directory: Path):
    samples = random_samples(seed=5, count=6)
    envs = ("letters", "letters", "numbers", "letters", "numbers", "numbers")
    result, _ = run(directory, samples, envs=envs)
    for env in set(envs):
        alone, _ = run(directory, [s for s, e in zip(samples, envs, strict=True) if e == env])
        for name in ("loss", "entropy", "mismatch_kl"):
            assert result.metrics[f"{name}/{env}"] == pytest.approx(alone.metrics[name], rel=1e-4)
    mixed = make_sample([5, 6, 7, 8], 1, advantages=[0, 1, 1, 0], ce_weights=[0, 0, 0, 0.5])
    beside, _ = run(directory, [*samples, mixed], envs=(*envs, "both"))
    alone, _ = run(directory, [mixed])
    assert beside.metrics["loss/both"] == pytest.approx(alone.metrics["loss"], rel=1e-4)
    same, _ = run(directory, samples, envs=("letters",) * 6)
    own = {name: value for name, value in same.metrics.items() if "letters" in name}
    assert own == {f"{name}/letters": same.metrics[name] for name in ("loss", "entropy")}


def test_stopping_between_micro_batches_changes_nothing(directory: Path):
    model = PackedModel(directory)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters().items()}
    step = TrainStep(model, Optimizer(model.named_parameters()), LOSSES, micro_batch_tokens=20)
    answers = iter([False, True])
    begun: list[tuple[int, int]] = []
    bins = pack(random_samples(1, 8), 20)
    stopped = step.run(
        bins, lr=1.0, stopped=lambda: next(answers), on_micro_batch=lambda *progress: begun.append(progress)
    )
    assert stopped is None
    ((number, total),) = begun
    assert number == 1 < total
    for name, parameter in model.named_parameters().items():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_an_optimizer_that_runs_out_of_memory_is_not_tried_again(directory: Path):
    """What ran out before it may be: there only gradients have changed."""

    class Full(Optimizer):
        def step(self, lr: float) -> float:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = PackedModel(directory)
    step = TrainStep(model, Full(model.named_parameters()), LOSSES)
    with pytest.raises(Failure, match=r"CUDA out of memory.*offload_state"):
        step.run(pack(random_samples(seed=3, count=2), 32), lr=1.0)
