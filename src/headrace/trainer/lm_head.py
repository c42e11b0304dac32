"""From a packed row to logprobs: the model with its lm-head in chunks, and gradients of the tables in place.

Logits of `chunk` tokens exist at a time; the backward pass recomputes them, except for those of the last chunk, which
are kept in the buffer that it needs anyway. Written by hand because the softmax's gradient is known in closed form:
one matrix product less than checkpointing, and no graph. On a GPU everything between two matrix products is one pass
over the logits (`lm_head_kernels.py`).

If the head is frozen, only the gradient of the hidden states is needed, which is linear in the incoming gradient per
token: the forward pass computes it for 1, and the backward pass scales it. Left out on purpose: the same for a trained
head, whose gradient is a sum over tokens and needs their scales first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from headrace.inference.latents import expected_embeddings, gaussian_logprobs, input_embeddings, noise_scale
from headrace.inference.schema import LatentParams
from headrace.trainer.packed_row import PackedRow


class Scores(NamedTuple):
    """Logprobs and entropies of the labels of a row."""

    logprobs: Tensor
    entropy: Tensor
    zero: Tensor
    """A zero that depends on every parameter, so that ranks without trained tokens run backward, too."""
    gates: dict[str, Tensor]
    """For a model with gates: their values at each token with a latent."""


class LabelScorer(torch.nn.Module):
    """The model and its lm-head as one module, since FSDP gathers parameters only inside a module's forward pass."""

    def __init__(
        self, model: Any, dtype: torch.dtype, fp32: bool, chunk: int, *, in_place: bool, latents: LatentParams | None
    ) -> None:
        super().__init__()
        self.model, self._latents = model, latents
        self._dtype, self._fp32, self._chunk, self._in_place = dtype, fp32, chunk, in_place
        self.keeps_logits = False

    def forward(
        self,
        row: PackedRow,
        predictors: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        latents: Tensor | None,
    ) -> Scores:
        if row.latents is not None and self._latents is None:
            raise ValueError("samples have latents, but the model is not set up for them (model.latents)")
        tokens, gates = {"input_ids": row.token_ids}, dict[str, Tensor]()
        if self._latents is not None:  # on every rank, also where no token of the row has one
            size = self.model.get_input_embeddings().embedding_dim
            blended = row.token_ids.new_zeros(row.token_ids.shape[1], size) if row.latents is None else row.latents
            embeddings, gates = input_embeddings(self.model, row.token_ids[0], blended)
            tokens = {"inputs_embeds": embeddings[None]}
        hidden = hidden_states(self.model, row, **tokens).to(self._dtype)
        head, divisor = self.model.get_output_embeddings().weight, logit_divisor(self.model.config)
        logprobs, entropy = label_logprobs(
            hidden.index_select(0, predictors),
            head,
            labels,
            temperatures if divisor == 1 else temperatures * divisor,
            max(1, len(labels)) if self.keeps_logits and torch.is_grad_enabled() else self._chunk,
            fp32=self._fp32,
            in_place=self._in_place and head.requires_grad,
            softcap=getattr(self.model.config, "final_logit_softcapping", None),
        )
        if latents is not None and self._latents is not None and self._latents.kind == "soft":
            soft = torch.nonzero(latents.any(-1))[:, 0]
            own = self._soft_logprobs(hidden.index_select(0, predictors[soft]), latents[soft], self._latents)
            logprobs = logprobs.index_copy(0, soft, own.to(logprobs.dtype))
        return Scores(logprobs, entropy, hidden[:0].sum() + logprobs[:0].sum(), gates)

    def _soft_logprobs(self, hidden: Tensor, latents: Tensor, params: LatentParams) -> Tensor:
        """Return the logprobs of soft latents; each chunk of logits is recomputed in the backward pass."""
        table = self.model.get_input_embeddings().weight
        sigma = noise_scale(table, params)

        def logprobs(hidden: Tensor, latents: Tensor) -> Tensor:
            expected = expected_embeddings(plain_logits(self.model, hidden), table, params)
            return gaussian_logprobs(latents, expected, sigma)

        pairs = zip(torch.split(hidden, self._chunk), torch.split(latents, self._chunk), strict=True)
        return torch.cat([checkpoint(logprobs, *pair, use_reentrant=False) for pair in pairs])


def hidden_states(model: Any, row: PackedRow, **tokens: Tensor) -> Tensor:
    """Return the last hidden state of each token of the row: [tokens, hidden]; `tokens` replace its ids."""
    inputs = {**(tokens or {"input_ids": row.token_ids}), "position_ids": row.position_ids, "layout": row.layout}
    return model.base_model(**inputs, use_cache=False).last_hidden_state[0]  # type: ignore[no-any-return]


def plain_logits(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits of hidden states, computed as by the model's own head."""
    head = model.get_output_embeddings().weight.to(hidden.dtype)
    logits: Tensor = hidden @ head.t() / logit_divisor(model.config)
    softcap = getattr(model.config, "final_logit_softcapping", None)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def logit_divisor(config: Any) -> float:
    """Return the number that logits are divided by: `logits_scaling` (Granite), or 1 / `logit_scale` (Cohere)."""
    return float(getattr(config, "logits_scaling", None) or 1 / (getattr(config, "logit_scale", None) or 1))


def label_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    chunk: int,
    *,
    fp32: bool = False,
    in_place: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return per token the log-softmax of logits / temperature at the label, and the entropy, which has no gradient.

    `hidden` is [tokens, hidden], `weight` the output embedding [vocabulary, hidden]; the rest is [tokens]. Logits are
    computed in the dtype of `hidden`, or with `fp32` in float32; the softmax is always at least float32. `in_place`
    accumulates the gradient of the weight, a parameter, in its `.grad` without a temporary of that size. `softcap`
    bounds the logits: softcap * tanh(logit / softcap).
    """
    if fp32:
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _LabelLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, labels, temperatures, chunk, in_place, softcap
        )
    return logprobs, entropy


class _LabelLogprobs(torch.autograd.Function):
    """The computation of `label_logprobs` in chunks, with its gradient."""

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        chunk: int,
        in_place: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        passes, narrow, temperatures = _passes(hidden.device.type, wide), weight.to(hidden.dtype), temperatures.to(wide)
        needs_hidden_grad, needs_weight_grad = context.needs_input_grad[:2]
        logprobs, normalizers, entropy = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(3))
        # With a frozen head: the gradient of the hidden states for an incoming gradient of 1.
        unit = torch.empty_like(hidden) if needs_hidden_grad and not needs_weight_grad else None
        logits = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        for part in _chunks(len(hidden), chunk):
            values = _cap(torch.mm(hidden[part], narrow.t(), out=logits[: len(labels[part])]), softcap)
            inputs = values, labels[part], temperatures[part]
            logprobs[part], normalizers[part], entropy[part] = passes.score(*inputs)
            if unit is not None:
                ones = torch.ones_like(logprobs[part])
                slope = _slope(values, softcap)
                gradient = _multiply(passes.gradient(*inputs, logprobs[part], normalizers[part], ones), slope)
                torch.mm(gradient, narrow, out=unit[part])
        context.save_for_backward(hidden, narrow, labels, temperatures, logprobs, normalizers, unit)
        context.weight = weight if needs_weight_grad else None
        context.logits = logits if needs_weight_grad else None  # of the last chunk, with which backward begins
        context.chunk, context.in_place, context.softcap = chunk, in_place, softcap
        context.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(context: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, narrow, labels, temperatures, logprobs, normalizers, unit = context.saved_tensors
        if unit is not None:
            return (unit * grad[:, None]).to(hidden.dtype), None, None, None, None, None, None
        if context.weight is None:
            return None, None, None, None, None, None, None
        passes = _passes(hidden.device.type, logprobs.dtype)
        grad_hidden = torch.empty_like(hidden) if context.needs_input_grad[0] else None
        if context.in_place:
            if context.weight.grad is None:
                context.weight.grad = torch.zeros_like(context.weight)
            grad_weight = context.weight.grad
        else:  # at least float32: a sum of many small parts
            wide = torch.promote_types(context.weight.dtype, torch.float32)
            grad_weight = torch.zeros_like(context.weight, dtype=wide)
        logits, context.logits = context.logits, None
        is_computed = logits is not None
        if logits is None:  # a second backward pass through the same graph
            logits = hidden.new_empty(min(context.chunk, len(hidden)), len(narrow))
        for part in reversed(_chunks(len(hidden), context.chunk)):
            values = logits[: len(labels[part])]
            if not is_computed:
                _cap(torch.mm(hidden[part], narrow.t(), out=values), context.softcap)
            is_computed = False
            slope = _slope(values, context.softcap)
            inputs = values, labels[part], temperatures[part], logprobs[part], normalizers[part], grad[part]
            gradient = _multiply(passes.gradient(*inputs), slope)
            if grad_hidden is not None:
                torch.mm(gradient, narrow, out=grad_hidden[part])
            _add_product(grad_weight, gradient.t(), hidden[part])
        returned = None if context.in_place else grad_weight.to(context.weight.dtype)
        return grad_hidden, returned, None, None, None, None, None


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Bound the logits in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _slope(capped: Tensor, softcap: float | None) -> Tensor | None:
    """Return the derivative of the capped logits with respect to the plain ones; None if it is 1."""
    return None if softcap is None else 1 - (capped / softcap) ** 2


def _multiply(gradient: Tensor, slope: Tensor | None) -> Tensor:
    return gradient if slope is None else gradient.mul_(slope)


class _Passes(NamedTuple):
    """Functions of a chunk's logits, labels and temperatures; `gradient` may overwrite the logits."""

    score: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Returns log-softmax at the label, its normalizer, and the entropy."""
    gradient: Callable[..., Tensor]
    """Returns the gradient of the logits, from the scores and the gradient of the logprobs, in the logits' dtype."""


@cache
def _passes(device: str, dtype: torch.dtype) -> _Passes:
    if device == "cuda" and dtype == torch.float32 and find_spec("triton") is not None:
        from headrace.trainer import lm_head_kernels

        return _Passes(lm_head_kernels.score, lm_head_kernels.gradient)
    return _Passes(_score, _gradient)


def _score(logits: Tensor, labels: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-softmax at the label, its normalizer and the entropy, as `lm_head_kernels.score` does.

    Logits x are taken relative to the largest, so that no term of the entropy, log(sum) - sum(p * x) with log(sum) >= 0
    and x <= 0, is negative. The difference of the normalizer and the mean logit could be negative by rounding.
    """
    scaled = logits / temperatures[:, None]
    largest = scaled.amax(-1)
    distances = scaled.sub_(largest[:, None])
    powers = distances.exp()
    total = powers.sum(-1)
    log_of_sum = total.log()
    chosen = distances.gather(-1, labels[:, None])[:, 0]
    entropy = log_of_sum - torch.linalg.vecdot(powers, distances) / total
    return chosen - log_of_sum, largest + log_of_sum, entropy


def _gradient(
    logits: Tensor, labels: Tensor, temperatures: Tensor, logprobs: Tensor, normalizers: Tensor, grad: Tensor
) -> Tensor:
    """Return grad * (label - softmax) / temperature, where label is 1 at the label and 0 elsewhere."""
    scale = (grad / temperatures)[:, None]
    scaled = logits / temperatures[:, None]
    gradient = scaled.sub_(normalizers[:, None]).exp_().mul_(-scale).to(logits.dtype)
    at_label = scale * -torch.expm1(logprobs)[:, None]
    return gradient.scatter_(-1, labels[:, None], at_label.to(logits.dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices to `total` without rounding the product to a narrower dtype than that."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _supports_wide_addmm(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif total.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


@cache
def _supports_wide_addmm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch supports addmm of narrow matrices into float32."""
    if device.type != "cuda":
        return False
    narrow, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, narrow, narrow, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def accumulate_in_place(table: torch.nn.Module) -> None:
    """Make a plain, trained embedding add its gradient to `.grad` in place; other modules are unchanged.

    The gradient is as large as the table, and zero except for the tokens of a batch; autograd would allocate such a
    tensor for each micro-batch, and a second one for a table that is also the lm-head. Not for sharded tables.
    """
    if type(table) is Embedding and table.weight.requires_grad and not (table.max_norm or table.scale_grad_by_freq):

        def forward(input: Tensor) -> Tensor:
            return _Lookup.apply(input, table.weight, table.padding_idx)  # type: ignore[no-any-return, no-untyped-call]

        table.forward = forward  # type: ignore[method-assign]


class _Lookup(torch.autograd.Function):
    """An embedding lookup whose gradient is added to the table's `.grad` in place."""

    @staticmethod
    def forward(context: Any, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        context.save_for_backward(tokens)
        context.weight, context.padding = weight, padding
        return embedding(tokens, weight)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[None, None, None]:
        (tokens,) = context.saved_tensors
        weight, gradients = context.weight, grad.flatten(0, -2)
        if context.padding is not None:  # not trained, as in torch
            gradients = gradients.masked_fill(tokens.flatten()[:, None] == context.padding, 0.0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens.flatten(), gradients.to(weight.dtype))
        return None, None, None
