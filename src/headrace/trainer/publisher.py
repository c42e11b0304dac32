"""How versions leave the trainer: as files that every rank writes a part of, or from the memory of the first rank."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Literal

from headrace.rollout.version import Version
from headrace.trainer.model import PackedModel
from headrace.trainer.model_files import whole_layers
from headrace.trainer.weights_link import Snapshot, WeightsSender, take_snapshot
from headrace.transport.weights import WeightStore


class Publisher:
    """Every rank has one, and all must call it alike.

    `host` and `port` are where engines reach the first rank over the link; without a host there are only files. An
    adapter is always a file: it is small.
    """

    def __init__(
        self,
        weights: WeightStore,
        model: PackedModel,
        *,
        host: str | None = None,
        port: int = 0,
        carrier: Literal["auto", "stream", "nccl"] = "auto",
    ) -> None:
        self._weights = weights
        self._model = model
        self._first = model.ranks.first
        self._linked = host is not None and model.adapter is None
        self._sender: WeightsSender | None = None
        if host is not None and self._linked and self._first:
            self._sender = WeightsSender(host, port, device=model.device, carrier=carrier)

    def publish(self, version: Version, *, lasting: bool = False) -> None:
        """Make the model's weights visible as `version`; `lasting`: so that they can be had without this process."""
        if self._linked and not lasting:
            self._offer(version)
        elif self._first:
            self._weights.publish(version, self._model.save_for_engine)
        else:
            self._model.save_for_engine(self._weights.draft(version))

    def retire(self, keep_last: int) -> None:
        """Let go of versions that every engine has moved past."""
        if not self._first:
            return
        self._weights.retire(keep_last)
        if self._sender is not None:
            self._sender.keep(self._weights.published())

    def close(self) -> None:
        """Versions that are not lasting can no longer be had."""
        if self._sender is not None:
            self._sender.close()

    def _offer(self, version: Version) -> None:
        model = self._model
        layers = whole_layers(model.module, model.tensors(), model.dtype, keep=self._first)
        tensors = (pair for layer in layers for pair in layer.items())  # one layer is whole at a time
        if self._sender is None:
            deque(tensors, maxlen=0)  # takes part in making them whole
            return
        snapshot = take_snapshot(tensors)
        self._weights.publish(version, lambda draft: self._write(draft, version, snapshot))

    def _write(self, draft: Path, version: Version, snapshot: Snapshot) -> None:
        assert self._sender is not None
        self._model.files.write(draft, self._model.dtype)
        self._sender.offer(version, snapshot, draft)
