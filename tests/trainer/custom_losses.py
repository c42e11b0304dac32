"""Losses as a user would write them, for `trainer.loss.type = "custom"`."""

import torch

from headrace.trainer.loss import LossInputs, LossOutputs


def cispo(inputs: LossInputs, limit: float) -> LossOutputs:
    """CISPO, with a Python number as a metric's count."""
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).detach().exp()
    per_token = -ratio.clamp(max=limit) * inputs.advantages * inputs.trainer_logprobs
    if inputs.loss_weights is not None:
        per_token = per_token * inputs.loss_weights
    return LossOutputs(per_token[inputs.loss_mask].sum(), {"own/sequences": (torch.tensor(1.0), 1)})


def mean_advantage(inputs: LossInputs) -> LossOutputs:
    """Trains every member of a sequence by the sequence's mean advantage: needs whole sequences, and one at a time."""
    assert type(inputs) is LossInputs
    assert inputs.loss_mask.any()
    members = inputs.loss_mask
    credit = inputs.advantages[members].mean()
    loss = -credit * inputs.trainer_logprobs[members].sum()
    return LossOutputs(loss, {"own/credit": (credit * members.sum(), members.sum())})


def changes_its_metrics(inputs: LossInputs) -> LossOutputs:
    names = {"own/long": (torch.tensor(1.0), torch.tensor(1))} if len(inputs.loss_mask) > 1 else {}
    return LossOutputs(inputs.trainer_logprobs.sum(), names)


def returns_a_tensor(inputs: LossInputs) -> torch.Tensor:
    return inputs.trainer_logprobs.sum()


def returns_a_loss_per_token(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(-inputs.trainer_logprobs)


def reports_the_loss(inputs: LossInputs) -> LossOutputs:
    loss = -inputs.trainer_logprobs.sum()
    return LossOutputs(loss, {"loss": (loss, inputs.loss_mask.sum())})


def drops_long_shots(inputs: LossInputs, below: float) -> LossOutputs:
    """REINFORCE without the tokens whose logprob is below a limit, and says which those are."""
    masked = inputs.trainer_logprobs.detach() < below
    kept = inputs.loss_mask & ~masked
    return LossOutputs(-(inputs.advantages * inputs.trainer_logprobs)[kept].sum(), masked=masked)


def says_masked_for_two_tokens(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(inputs.trainer_logprobs.sum(), masked=torch.zeros(2, dtype=torch.bool))


def detached(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(-(inputs.advantages * inputs.trainer_logprobs)[inputs.loss_mask].sum().detach())


def in_numpy(inputs: LossInputs) -> LossOutputs:
    per_token = -inputs.advantages.numpy() * inputs.trainer_logprobs.detach().numpy()
    return LossOutputs(torch.tensor(per_token[inputs.loss_mask.numpy()].sum()))


@torch.no_grad()
def without_gradients(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(-inputs.trainer_logprobs[inputs.loss_mask].sum())


def detached_from_two_tokens_on(inputs: LossInputs) -> LossOutputs:
    loss = -inputs.trainer_logprobs.sum()
    return LossOutputs(loss.detach() if len(inputs.loss_mask) > 1 else loss)


def leaves_out_what_was_bad(inputs: LossInputs) -> LossOutputs:
    """Learns from what was better than the rest alone: the 0 that it has for the others is a constant."""
    members = inputs.loss_mask
    if not (inputs.advantages[members] > 0).any():
        return LossOutputs(torch.tensor(0.0))
    return LossOutputs(-(inputs.advantages * inputs.trainer_logprobs)[members].sum())


def leaves_out_everything(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(torch.tensor(0.0))
