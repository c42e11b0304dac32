"""Headrace's extension of a vLLM worker: loads published weights, from their directory or over the link.

Start vLLM with `worker_extension_cls="headrace.inference.vllm.worker.PublishedWeightsWorker"` and call the methods
below on all workers with `collective_rpc`. vLLM runs such a call between two steps. So a version is first fetched in
the background; once every worker has it, it is loaded, which is a copy in memory. Loading without fetching first works,
but if only some workers succeed, the model has weights of two versions.

Each worker reads or receives whole tensors, checks them, and takes its shard; the trainer need not know how many
workers there are. Left out: clearing vLLM's prefix cache, which belongs to the engine. For versions of vLLM that do not
report which weights sampled a token, the workers count the tokens of each request.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.inference.weights.link import WeightsReceiver
from headrace.inference.weights.published import (
    BaseWeights,
    PublishedWeights,
    find_mismatch,
    model_files,
    read_published,
)
from headrace.inference.weights.reading import WeightsError, WeightsUnreachable, release_when_done
from headrace.rollout.version import Version
from headrace.text.hub import model_directory
from headrace.transport.files import in_daemon_thread

_HEAD = "lm_head.weight"
FETCH_SKEW_S = 120.0
"""How much longer one replica may take to fetch a version than another."""
MAX_ENDED_REQUESTS = 16384
"""Finished requests that are remembered, since their responses may not have been read yet."""


class PublishedWeightsWorker:
    """A mix-in of vLLM's worker, which has these attributes."""

    device: torch.device
    model_config: Any
    model_runner: Any
    reload_weights: Any

    def fetch_published(self, path: str, version: str) -> None:
        """Start to fetch a version in the background, and drop the one fetched before."""
        self._published_weights.begin(Path(path), Version.parse(version))

    def has_published(self, path: str, version: str) -> dict[str, Any]:
        """Return whether a version has been fetched (`done`), or why that failed (`problem`).

        Nothing is raised, since vLLM would report only the first of several failing workers.
        """
        try:
            return {"done": self._published_weights.has(Path(path), Version.parse(version)), "problem": None}
        except WeightsError as error:
            return {"done": False, "problem": str(error), "unreachable": isinstance(error, WeightsUnreachable)}

    def await_published(self, path: str, version: str) -> None:
        """Wait until a version has been fetched; raises if that fails.

        For several replicas, of which vLLM reports only the first one's result but any one's failure. It blocks steps,
        so it is called once the first replica has the version.
        """
        self._published_weights.wait(Path(path), Version.parse(version), FETCH_SKEW_S)

    def load_published(self, path: str, version: str) -> str:
        """Load a version and return its checksum. On a failure to fetch it the model is unchanged."""
        published = self._published_weights.take(Path(path), Version.parse(version))
        try:
            if self.device.type == "cpu":
                for layer in self.model_runner.get_model().modules():
                    method: Any = getattr(layer, "quant_method", None)
                    if hasattr(method, "moe_kernel"):
                        # vLLM packs the weights of experts for a new kernel only, and would copy new ones unpacked.
                        method.moe_kernel = None
            self.reload_weights(weights_iterator=iter(published.tensors.items()))
            head = getattr(self.model_runner.get_model(), "lm_head", None)  # some models have the embeddings for one
            if head is not None and self.model_config.hf_config.tie_word_embeddings:
                # On CPUs the head has a copy of the embeddings, which reloading does not update.
                head.quant_method.process_weights_after_loading(head)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the source may be the trainer's memory
        finally:
            published.release()
        return published.checksum

    def report_untruncated_logprobs(self) -> bool:
        """Return whether the sampler could be patched."""
        return report_untruncated(self.model_runner)

    def count_tokens(self) -> None:
        """Start to record finished requests, for `sampled_tokens`."""
        execute_model = self.model_runner.execute_model

        def recording(scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            self._ended_requests.extend(scheduler_output.finished_req_ids)
            return execute_model(scheduler_output, *arguments, **named)

        self.model_runner.execute_model = recording

    def sampled_tokens(self) -> dict[str, Any]:
        """Return each request's number of tokens in a paused engine, and the recently finished requests."""
        requests = self.model_runner.requests
        counts = {name: len(request.output_token_ids) for name, request in requests.items()}
        return {"counts": counts, "ended": list(self._ended_requests)}

    @cached_property
    def _ended_requests(self) -> deque[str]:
        return deque(maxlen=MAX_ENDED_REQUESTS)

    @cached_property
    def _published_weights(self) -> Fetcher:
        config = self.model_config
        return Fetcher(self.device, model_directory(config.model), config.dtype, config.hf_config.tie_word_embeddings)


class Fetcher:
    """Fetches versions for one worker, each on a thread. `base` is the directory that vLLM was started with."""

    def __init__(self, device: torch.device, base: Path, dtype: torch.dtype, tied: bool) -> None:
        self._link = WeightsReceiver(device)
        self._base = BaseWeights(base, device)
        self._dtype = dtype
        self._tied = tied
        self._begun: tuple[Path, Version, Future[PublishedWeights]] | None = None

    def begin(self, directory: Path, version: Version) -> None:
        self._drop_fetch()
        self._begun = (directory, version, in_daemon_thread(partial(self._fetch, directory, version)))

    def has(self, directory: Path, version: Version) -> bool:
        """Whether `take` would return at once; raises what it would raise."""
        begun = self._find_fetch(directory, version)
        if begun is None or not begun.done():
            return False
        begun.result()
        return True

    def wait(self, directory: Path, version: Version, timeout: float) -> None:
        """Wait until the version has been fetched; raises what `take` would raise."""
        begun = self._find_fetch(directory, version)
        if begun is None:
            raise WeightsError(f"the fetch of {version} from {directory} was not started")
        try:
            begun.result(timeout)
        except TimeoutError as error:
            raise WeightsUnreachable(f"{version} took {timeout:g} s longer than on another replica") from error

    def take(self, directory: Path, version: Version) -> PublishedWeights:
        """Return the version, complete and checked against the model. Each fetch is returned, or raises, once."""
        begun = self._find_fetch(directory, version)
        if begun is None:
            self._drop_fetch()
            begun = in_daemon_thread(partial(self._fetch, directory, version))
        self._begun = None
        return begun.result()

    def _drop_fetch(self) -> None:
        """Release the last fetch, which will not be taken, after it has finished."""
        if self._begun is not None:
            release_when_done(self._begun[2])

    def _find_fetch(self, directory: Path, version: Version) -> Future[PublishedWeights] | None:
        """Return the fetch that was begun, if it is of this version."""
        if self._begun is None or self._begun[:2] != (directory, version):
            return None
        return self._begun[2]

    def _fetch(self, directory: Path, version: Version) -> PublishedWeights:
        """Read or receive a version, and check that it fits the model."""
        published = read_published(
            directory, version, parameters=self._model, receive=self._link.receive, base=self._base
        )
        problem = find_mismatch(self._model, published.tensors, {_HEAD} if self._tied else ())
        if problem is not None:  # vLLM itself would fail halfway through
            published.release()
            raise WeightsError(f"{directory} does not fit the model in {self._base.directory}: {problem}")
        return published

    @cached_property
    def _model(self) -> dict[str, Tensor]:
        """The model that vLLM was started with, as meta tensors."""
        tensors = {}
        for path in model_files(self._base.directory):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    shape = file.get_slice(name).get_shape()
                    tensors[name] = torch.empty(shape, dtype=self._dtype, device="meta")
        return tensors


def report_untruncated(model_runner: Any) -> bool:
    """Patch the runner's sampler to report logprobs at the request's temperature over the whole vocabulary.

    With `processed_logprobs` vLLM reports those after top-p, top-k and min-p. Both of its samplers apply the
    temperature first: the logits at that moment are kept and reported. Returns False for an unknown sampler, which is
    left unchanged. The caller must check the result, since vLLM's samplers are not a stable interface.
    """
    sampler: Any = getattr(model_runner, "sampler", None)
    if hasattr(sampler, "topk_topp_sampler") and hasattr(sampler, "apply_temperature"):
        _keep_logprobs(sampler)
    elif hasattr(sampler, "sampling_states") and hasattr(sampler.sampling_states, "apply_min_p"):
        _keep_logits(sampler)
    else:
        return False
    return True


def _keep_logprobs(sampler: Any) -> None:
    """Patch the sampler of the first model runner, which returns logprobs."""
    apply_temperature, sample = sampler.apply_temperature, sampler.sample
    kept: list[Any] = []

    def keeping(logits: Any, *arguments: Any) -> Any:
        logits = apply_temperature(logits, *arguments)
        kept.append(logits.clone())
        return logits

    def sampling(*arguments: Any, **named: Any) -> Any:
        sampled, logprobs = sample(*arguments, **named)
        if kept:  # else all requests are greedy, and nothing was removed
            logits = kept.pop()
            logprobs = None if logprobs is None else sampler.compute_logprobs(logits)
        return sampled, logprobs

    sampler.apply_temperature, sampler.sample = keeping, sampling


def _keep_logits(sampler: Any) -> None:
    """Patch the sampler of the second model runner, which returns logits."""
    apply_min_p, sample = sampler.sampling_states.apply_min_p, sampler.sample
    kept: list[Any] = []

    def keeping(logits: Any, *arguments: Any) -> Any:
        kept.append(logits.clone())  # the temperature is already applied
        return apply_min_p(logits, *arguments)

    def sampling(*arguments: Any, **named: Any) -> Any:
        sampled, logits = sample(*arguments, **named)
        return sampled, kept.pop() if kept else logits

    sampler.sampling_states.apply_min_p, sampler.sample = keeping, sampling
