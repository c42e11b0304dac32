"""A step in the queue of a GPU, and its output: tokens sampled there, or by torch from the logits of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.inference.embedded.grammar import Masks
from headrace.inference.embedded.logits_processing import process_logits
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.runner import StepOutput, next_latents, top_alternatives
from headrace.inference.embedded.sampling import sample

NOT_DRAFTED = -2
"""Neither a token nor `PENDING`."""


class SampledPart(NamedTuple):
    """Requests that one forward sampled for."""

    requests: Sequence[Request]
    rows: range | list[int]
    """Each one's row of the logits; a range if these are the first ones, since a list takes longer."""
    logits: Tensor
    begin: int
    """Column of the first row's token and logprob among the sampled ones."""
    model: Any
    drafted: Sequence[int] = ()
    """The token of each row if it is one of a draft, else `NOT_DRAFTED`; the rows of a request are in order. Empty if
    there are no drafts."""

    def output(self, sampled: Tensor, masks: Masks | None) -> StepOutput:
        """Return the tokens in `sampled`; torch samples for requests that truncate or change the distribution."""
        requests = self.requests
        columns = sampled.numpy()[:, self.begin :]
        columns = columns[:, : len(self.rows)] if isinstance(self.rows, range) else columns[:, self.rows]
        tokens, logprobs = columns[0].astype(np.int64).tolist(), columns[1].tolist()
        if self.drafted:
            kept = [*right_rows(self.drafted, tokens)]
            requests, tokens, logprobs = ([each[row] for row in kept] for each in (requests, tokens, logprobs))
        if masks is None and all(request.is_plain for request in requests):
            return StepOutput(requests, tokens, logprobs, None, {})
        logits = process_logits(self.logits[list(self.rows)], requests, masks)
        log_masses = None
        drawing = [row for row, each in enumerate(requests) if each.params.truncates or each.processes_logits]
        if drawing:
            own = [requests[row] for row in drawing]
            drawn = sample(logits[drawing], [each.params for each in own], [each.uniform() for each in own])
            log_masses = [0.0] * len(requests)
            drawn_columns = torch.stack([column.double() for column in drawn if column is not None], 1)
            for row, (token, logprob, *log_mass) in zip(drawing, drawn_columns.tolist(), strict=True):
                tokens[row], logprobs[row], log_masses[row] = int(token), logprob, sum(log_mass)
        latents = next_latents(self.model, requests, logits)
        return StepOutput(requests, tokens, logprobs, log_masses, top_alternatives(requests, logits), latents)


def right_rows(drafted: Sequence[int], sampled: Sequence[int]) -> Iterator[int]:
    """Yield the rows whose tokens are right: a token of a draft is, if it was sampled in the row before, which is right
    itself."""
    is_right = True
    for row, token in enumerate(drafted):
        is_right = token == NOT_DRAFTED or (is_right and sampled[row - 1] == token)
        if is_right:
            yield row


class StepTimes(NamedTuple):
    """When the GPU began and ended a step, and when it wrote the sampled tokens."""

    begun: torch.cuda.Event
    ended: torch.cuda.Event
    written: torch.cuda.Event

    @classmethod
    def make(cls) -> StepTimes:
        return cls(*(torch.cuda.Event(enable_timing=True) for _ in range(3)))  # type: ignore[no-untyped-call]


@dataclass
class CudaStep:
    """A step in the GPU's queue."""

    parts: list[SampledPart]
    host: Tensor
    """Gets the sampled tokens and logprobs."""
    times: StepTimes | None
    allows_next: bool
    late: Callable[[], Masks | None] | None
    """Called once the step before was read: samples with masks, or starts to compute those that torch samples with."""
    masks: Masks | None = None

    @property
    def sampling(self) -> Sequence[Request]:
        return [request for part in self.parts for request in part.requests]

    def sample(self) -> None:
        if self.late is not None:
            self.masks = self.late()

    def output(self) -> StepOutput:
        device_s = 0.0
        if self.times is not None:
            self.times.written.synchronize()
            device_s = self.times.begun.elapsed_time(self.times.ended) / 1e3
        outputs = [part.output(self.host, self.masks) for part in self.parts]
        if len(outputs) == 1:
            return outputs[0]._replace(device_s=device_s)
        log_masses = None
        if any(output.log_masses is not None for output in outputs):
            log_masses = [mass for each in outputs for mass in each.log_masses or [0.0] * len(each.requests)]
        return StepOutput(
            [request for each in outputs for request in each.requests],
            [token for each in outputs for token in each.tokens],
            [logprob for each in outputs for logprob in each.logprobs],
            log_masses,
            {request: top for each in outputs for request, top in each.alternatives.items()},
            {request: latent for each in outputs for request, latent in each.latents.items()},
            device_s,
        )
