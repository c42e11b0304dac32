"""The loss of the rl component as a user's function of one sequence."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from headrace.config.trainer import LOSSES, LossConfig
from headrace.errors import BadInput, Failure
from headrace.imports import load
from headrace.trainer.loss import RESERVED_METRICS, Loss, LossInputs, LossOutputs, PackedInputs, mismatch_kl

if TYPE_CHECKING:
    from torch import Tensor


@LOSSES.register
class CustomLossConfig(LossConfig):
    """A loss of your own: a function from one sequence's `LossInputs` to `LossOutputs` (`headrace.trainer.loss`)."""

    type: Literal["custom"] = "custom"
    import_path: str
    """`package.module:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your function, beside the inputs."""

    @property
    def label(self) -> str:
        return self.import_path

    def make(self) -> Loss:
        return CustomLoss(self.import_path, self.kwargs)


class CustomLoss:
    """Applies a user's function, `package.module:function`, to each sequence and sums the results.

    It gets the sequence's trained tokens of all components, in order; `loss_mask` marks the members of this one. It is
    not called for sequences without members. It is called once at the start, with a sequence of one token, since every
    rank must report the same metrics, also one without sequences. A loss without a gradient is refused, unless it is 0,
    with which a function may leave a sequence out.
    """

    def __init__(self, import_path: str, kwargs: dict[str, Any]) -> None:
        self.import_path = import_path
        function = load(import_path, "trainer.loss.import_path")
        try:
            inspect.signature(function).bind(None, **kwargs)
        except TypeError as error:
            raise BadInput(
                f"{import_path} does not take them: {error}", key="trainer.loss.kwargs", value=kwargs
            ) from error
        self._function = partial(function, **kwargs)
        import torch

        one = torch.ones(1)
        sequence = LossInputs((-one).requires_grad_(), -one, -one, one, one.bool(), one)
        outputs = self._function(sequence)
        self._check(outputs, sequence)
        self._metrics = list(outputs.metrics)
        self._reports_masked = outputs.masked is not None

    def __call__(self, inputs: PackedInputs) -> LossOutputs:
        import torch

        loss = inputs.trainer_logprobs.new_zeros(())
        sums = {name: (torch.zeros_like(loss), torch.zeros_like(loss)) for name in self._metrics}
        masked = torch.zeros_like(inputs.loss_mask)
        for span, sequence in _split_sequences(inputs):
            outputs = self._function(sequence)
            self._check(outputs, sequence)
            if outputs.metrics.keys() != sums.keys():
                raise Failure(
                    f"loss {self.import_path!r} reported {', '.join(outputs.metrics) or 'no metrics'} for one sequence "
                    f"and {', '.join(sums) or 'none'} for another: report the same metrics always"
                )
            loss = loss + outputs.loss
            sums = {name: (s + outputs.metrics[name][0], c + outputs.metrics[name][1]) for name, (s, c) in sums.items()}
            if outputs.masked is not None:
                masked[span] = outputs.masked
        metrics = {"mismatch_kl": mismatch_kl(inputs), **sums}
        return LossOutputs(loss, metrics, masked if self._reports_masked else None)

    def _check(self, outputs: Any, sequence: LossInputs) -> None:
        """Raise unless the result of the user's function is a loss with a gradient and valid metrics."""
        import torch

        if not isinstance(outputs, LossOutputs):
            raise Failure(
                f"loss {self.import_path!r} returned {type(outputs).__name__}: return headrace.trainer.loss.LossOutputs"
            )
        if not isinstance(outputs.loss, torch.Tensor) or outputs.loss.ndim != 0:
            raise Failure(f"loss {self.import_path!r} returned a loss that is not a scalar tensor: return a sum")
        if torch.is_grad_enabled() and not outputs.loss.requires_grad and outputs.loss != 0:
            file = getattr(sys.modules.get(self.import_path.partition(":")[0]), "__file__", None)
            raise Failure(
                f"loss {self.import_path!r}{f' ({file})' if file else ''} returned {float(outputs.loss):g} without a "
                "gradient, from which nothing can be learned: compute it from inputs.trainer_logprobs in torch alone; "
                "on the way from there to the sum must be no detach(), item(), numpy or torch.no_grad()"
            )
        if outputs.masked is not None and outputs.masked.shape != sequence.loss_mask.shape:
            raise Failure(
                f"loss {self.import_path!r} returned {tuple(outputs.masked.shape)} as `masked` for a sequence of "
                f"{len(sequence.loss_mask)} tokens: return one value per token, or leave it out"
            )
        for name in RESERVED_METRICS & outputs.metrics.keys():
            raise Failure(f"loss {self.import_path!r} reports {name!r}, which the step reports itself: rename it")


def _split_sequences(inputs: PackedInputs) -> Iterator[tuple[slice, LossInputs]]:
    """Return the slice and the inputs of each sequence that has members."""
    import torch

    lengths = torch.unique_consecutive(inputs.sequences, return_counts=True)[1].tolist()
    spans = (slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True))

    def parts(values: Tensor | None) -> Iterable[Any]:
        return repeat(None, len(lengths)) if values is None else torch.split(values, lengths)

    columns = [parts(getattr(inputs, column.name)) for column in fields(LossInputs)]
    sequences = (LossInputs(*values) for values in zip(*columns, strict=True))
    return (pair for pair in zip(spans, sequences, strict=True) if pair[1].loss_mask.any())
