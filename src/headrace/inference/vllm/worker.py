"""What Headrace adds to each worker of a vLLM engine: loading published weights, from their directory or over the link.

Start vLLM with `worker_extension_cls="headrace.inference.vllm.worker.PublishedWeightsWorker"`, and call the methods
below on all workers with `collective_rpc`. vLLM runs such a call between two steps, so a version is fetched first,
which goes on beside the steps; once every worker has it, it is loaded, which is a copy in memory. Loading before that
would fetch too, but where only some of the workers succeed, the model would be of two versions.

Each worker reads, or receives, whole tensors, checks them, and takes its share of them; so the trainer need not know
how many there are. Left out on purpose: emptying vLLM's prefix cache, which belongs to the engine. For a vLLM whose
answers do not say which weights sampled what, the workers of a paused engine tell how far each request is.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.inference.vllm.untruncated import report_untruncated
from headrace.inference.weights.base_weights import BaseWeights, model_files
from headrace.inference.weights.errors import WeightsError, WeightsUnreachable
from headrace.inference.weights.link import WeightsReceiver
from headrace.inference.weights.published import PublishedWeights, find_mismatch, read_published
from headrace.rollout.version import Version
from headrace.text.hub import model_directory

_HEAD = "lm_head.weight"
LONGEST_WAIT = 120.0
"""Seconds that one copy of the model may take longer to fetch a version than another."""
REMEMBERED = 16384
"""Requests that ended, whose answers may be on their way."""


class PublishedWeightsWorker:
    """Becomes a base class of vLLM's worker, whose attributes these are."""

    device: torch.device
    model_config: Any
    model_runner: Any
    reload_weights: Any

    def fetch_published(self, path: str, version: str) -> None:
        """Begin to fetch a version in the background; returns at once. What was fetched before is forgotten."""
        self._published_weights.begin(Path(path), Version.parse(version))

    def has_published(self, path: str, version: str) -> dict[str, Any]:
        """Whether a version that was begun is there (`done`), or why it cannot be had (`problem`).

        It raises nothing: of several workers that fail, vLLM would tell of the first alone.
        """
        try:
            return {"done": self._published_weights.has(Path(path), Version.parse(version)), "problem": None}
        except WeightsError as error:
            return {"done": False, "problem": str(error), "unreachable": isinstance(error, WeightsUnreachable)}

    def await_published(self, path: str, version: str) -> None:
        """Wait for a version that was begun; raises why it cannot be had.

        For several copies of the model: vLLM tells what the first returns, but a failure of any. Steps wait for it, so
        it is called once the first copy has the version.
        """
        self._published_weights.wait(Path(path), Version.parse(version), LONGEST_WAIT)

    def load_published(self, path: str, version: str) -> str:
        """Go on with a version, once it is there; returns its checksum. Refused, it leaves the model as it was."""
        published = self._published_weights.take(Path(path), Version.parse(version))
        try:
            self.reload_weights(weights_iterator=iter(published.tensors.items()))
            if self.model_config.hf_config.tie_word_embeddings:
                # On CPUs the head computes with a copy of the embeddings, which reloading these leaves as it was.
                head = self.model_runner.get_model().lm_head
                head.quant_method.process_weights_after_loading(head)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # what was fetched may be the trainer's memory
        finally:
            published.release()
        return published.checksum

    def report_untruncated_logprobs(self) -> bool:
        """Whether this vLLM's sampler is one that can be told to."""
        return report_untruncated(self.model_runner)

    def count_tokens(self) -> None:
        """Begin to remember what `sampled_tokens` tells."""
        execute_model = self.model_runner.execute_model

        def remembering(scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            self._ended_requests.extend(scheduler_output.finished_req_ids)
            return execute_model(scheduler_output, *arguments, **named)

        self.model_runner.execute_model = remembering

    def sampled_tokens(self) -> dict[str, Any]:
        """How many tokens each request of a paused engine has, and which ended lately; others have not begun."""
        requests = self.model_runner.requests
        counts = {name: len(request.output_token_ids) for name, request in requests.items()}
        return {"counts": counts, "ended": list(self._ended_requests)}

    @cached_property
    def _ended_requests(self) -> deque[str]:
        return deque(maxlen=REMEMBERED)

    @cached_property
    def _published_weights(self) -> Fetcher:
        config = self.model_config
        return Fetcher(self.device, model_directory(config.model), config.dtype, config.hf_config.tie_word_embeddings)


class Fetcher:
    """Fetches versions for one worker, on a thread of its own. `base` is the directory that vLLM was started with."""

    def __init__(self, device: torch.device, base: Path, dtype: torch.dtype, tied: bool) -> None:
        self._link = WeightsReceiver(device)
        self._base = BaseWeights(base, device)
        self._dtype = dtype
        self._tied = tied
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="published-weights")
        self._begun: tuple[Path, Version, Future[PublishedWeights]] | None = None

    def begin(self, directory: Path, version: Version) -> None:
        self._forget()
        self._begun = (directory, version, self._thread.submit(self._fetch, directory, version))

    def has(self, directory: Path, version: Version) -> bool:
        """Whether `take` would return, and at once; raises what it would raise."""
        begun = self._of(directory, version)
        if begun is None or not begun.done():
            return False
        begun.result()
        return True

    def wait(self, directory: Path, version: Version, longest: float) -> None:
        """Until `has` would say so; raises what it would raise."""
        begun = self._of(directory, version)
        if begun is None:
            raise WeightsError(f"nobody has begun to fetch {version} from {directory}")
        try:
            begun.result(longest)
        except TimeoutError as error:
            raise WeightsUnreachable(f"{version} took {longest:g} s longer than elsewhere") from error

    def take(self, directory: Path, version: Version) -> PublishedWeights:
        """The version, complete and fit for the model. It is handed out, or refused, once."""
        begun = self._of(directory, version)
        if begun is None:
            self._forget()
            begun = self._thread.submit(self._fetch, directory, version)
        self._begun = None
        return begun.result()

    def _forget(self) -> None:
        """Nobody will take what was begun last."""
        if self._begun is not None:
            self._thread.submit(_release, self._begun[2])  # which it has fetched by then

    def _of(self, directory: Path, version: Version) -> Future[PublishedWeights] | None:
        if self._begun is None or self._begun[:2] != (directory, version):
            return None
        return self._begun[2]

    def _fetch(self, directory: Path, version: Version) -> PublishedWeights:
        published = read_published(
            directory, version, parameters=self._model, receive=self._link.receive, base=self._base
        )
        problem = find_mismatch(self._model, published.tensors, {_HEAD} if self._tied else ())
        if problem is not None:  # vLLM itself would notice halfway through
            published.release()
            raise WeightsError(f"{directory} does not fit the model in {self._base.directory}: {problem}")
        return published

    @cached_property
    def _model(self) -> dict[str, Tensor]:
        """What vLLM was started with, by name and shape alone."""
        found = {}
        for path in model_files(self._base.directory):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    shape = file.get_slice(name).get_shape()
                    found[name] = torch.empty(shape, dtype=self._dtype, device="meta")
        return found


def _release(fetched: Future[PublishedWeights]) -> None:
    if fetched.exception() is None:
        fetched.result().release()
