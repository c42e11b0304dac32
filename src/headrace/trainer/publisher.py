"""Publishing of versions: as files written by all ranks, or from the memory of the first rank over the link."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from pathlib import Path

from headrace.inference.weights.file_layout import as_in_files
from headrace.inference.weights.link import CarrierSetting
from headrace.inference.weights.reading import WeightsError
from headrace.rollout.version import Version
from headrace.trainer.attention import UnsupportedModel
from headrace.trainer.checkpoint import ResumeError
from headrace.trainer.host_copies import PUBLISHED_COPIES
from headrace.trainer.learner import Learner
from headrace.trainer.lora import merged_parameters
from headrace.trainer.model import PackedModel
from headrace.trainer.model_files import gather_layers, meta_tensors
from headrace.trainer.snapshot import size_of, take_snapshot
from headrace.trainer.weights_link import WeightsSender
from headrace.transport.run_dir import RunDir
from headrace.transport.weights import WeightStore

log = logging.getLogger(__name__)


class Publisher:
    """Publishes the weights of a model. Every rank has one, and all must make the same calls.

    `host` and `port`: address of the first rank for engines over the link; without a host, versions are files. Adapters
    are always files: they are small. `shared`: engines are on this GPU; the memory shared with them is allocated at
    once, so that the memory plan, made later, accounts for it. `lasting_every`: versions whose step this divides are
    files on disk, whatever happens to this process.
    """

    def __init__(
        self,
        weights: WeightStore,
        model: PackedModel,
        *,
        host: str | None = None,
        port: int = 0,
        carrier: CarrierSetting = "auto",
        shared: bool = False,
        lasting_every: int | None = None,
    ) -> None:
        self._weights, self._model, self._lasting_every = weights, model, lasting_every
        self._is_first = model.ranks.is_first
        if model.adapter is not None:
            host = None
        self._linked = host is not None
        self._sender: WeightsSender | None = None
        self.host_bytes = 0
        """Bytes of this rank's host memory for the versions that it serves."""
        if host is not None and self._is_first:
            self._sender = WeightsSender(host, port, device=model.device, carrier=carrier)
            self.host_bytes = PUBLISHED_COPIES * self._version_bytes()
            if shared or carrier == "ipc":
                self._sender.allocate_shared(self._version_bytes())

    def check_embedded(self) -> None:
        """Raise if the embedded engine, which has tensors as in memory, cannot install them from files."""
        model = self._model
        try:
            as_in_files(model.module, merged_parameters(meta_tensors(model.tensors()), scaling=1.0))
        except WeightsError as error:
            fact = f"the embedded engine cannot load {type(model.module).__name__} from the trainer: {error}"
            fix = 'Set inference.engine = "vllm", or choose another model.'
            raise UnsupportedModel(fact, key="model.name", value=model.directory, fix=fix) from error

    def publish(self, version: Version, *, lasting: bool = False) -> None:
        """Publish the current weights as `version`; `lasting`: as files, available after this process has ended."""
        durable = self.is_lasting(version)
        if self._linked and not (lasting or durable):
            self._offer(version)
        elif self._is_first:
            self._weights.publish(version, self._model.save_for_engine, durable=durable)
        else:
            self._model.save_for_engine(self._weights.draft(version))

    def is_lasting(self, version: Version) -> bool:
        """Return whether a version must stay on disk, since it may be needed long after it was published."""
        return self._lasting_every is not None and version.step % self._lasting_every == 0

    def retire(self, keep_last: int, kept_steps: Collection[int] = ()) -> None:
        """Delete versions that no engine needs any more."""
        if not self._is_first:
            return
        self._weights.retire(keep_last, kept_steps)
        if self._sender is not None:
            self._sender.keep(self._weights.published())

    def close(self) -> None:
        """Stop serving versions from memory."""
        if self._sender is not None:
            self._sender.close()

    def _offer(self, version: Version) -> None:
        """Publish the current weights as `version` over the link; every rank takes part in gathering them."""
        model = self._model
        layers = gather_layers(model.module, model.tensors(), model.dtype, receiver=0 if self._is_first else None)
        tensors = (pair for layer in layers for pair in layer.items())  # gathered one layer at a time
        if self._sender is None:
            deque(tensors, maxlen=0)  # takes part in gathering
            return
        acknowledged = self._weights.acknowledged()
        needed = [each for each in self._weights.published() if acknowledged is None or each >= acknowledged]
        self._sender.keep(needed)  # before the copy, which reuses the memory of the others
        snapshot = take_snapshot(tensors, buffer=self._sender.writable_buffer(self._version_bytes))
        sender = self._sender

        def write(draft: Path) -> None:
            model.files.write(draft, model.dtype)
            sender.offer(version, snapshot, draft)

        self._weights.publish(version, write)

    def _version_bytes(self) -> int:
        """Return the bytes of a version."""
        layers = gather_layers(self._model.module, meta_tensors(self._model.tensors()), self._model.dtype, receiver=0)
        return size_of(tensor for layer in layers for tensor in layer.values())


def enter_incarnation(learner: Learner, run: RunDir, publisher: Publisher, *, resuming: bool) -> None:
    """Choose a higher incarnation after a restart, and publish the loaded version; at first only if it is lasting."""
    published = run.weights.published() if learner.ranks.is_first else []
    seen = [version.incarnation for version in published]
    if not resuming and seen:
        fact = "the run already has published weights"
        raise ResumeError(fact, key="output_dir", value=run.root, fix="Resume the run, or choose another output_dir.")
    if learner.state.step:
        seen.append(learner.state.incarnation)
    acknowledged = run.weights.acknowledged() if resuming else None
    if acknowledged is not None and acknowledged.step:  # the launcher may have deleted the version itself
        seen.append(acknowledged.incarnation)
    incarnation = learner.ranks.max(1 + max(seen, default=-1))
    if not incarnation:
        if publisher.is_lasting(learner.version):
            publisher.publish(learner.version)
        return
    learner.state.incarnation = incarnation
    if learner.ranks.is_first:
        run.batches.delete_through(learner.state.step)
        run.weights.delete_incomplete()
    # The last version must be available after this process has ended.
    publisher.publish(learner.version, lasting=learner.state.step >= learner.max_steps)
    log.info("resumed at step %d as incarnation %d", learner.state.step, learner.state.incarnation)
