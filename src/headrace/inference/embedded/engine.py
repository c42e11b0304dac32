"""The embedded engine: continuous batching over an ordinary transformers model.

A step admits waiting requests, fills their rows of the KV cache with all but the last prompt token, and decodes the
next token of every running request; so requests join and leave between any two tokens, and sampling happens in one
place only. New weights recompute the rows of running requests through that same filling. Requests that repeat a
running prompt, as the members of a group do, copy its row instead of computing it.

The engine is synchronous: one thread calls `step` and `update_weights` (see `thread`); `submit` and `cancel` may
come from others. A request that cannot be finished gets an error; the engine goes on.

Left out on purpose: paged KV, prefix sharing between different prompts, CUDA graphs, speculative decoding.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.inference.embedded.kv_cache import ATTENTION, KEY_BUCKET, Access, Decode, KVCache, Prefill
from headrace.inference.embedded.request import EngineError, InvalidRequest, Request, RequestCancelled
from headrace.inference.embedded.sampling import sample, scaled_logprobs
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.link import WeightsReceiver
from headrace.inference.weights.published import PublishedWeights, install, read_published
from headrace.rollout.version import Version

log = logging.getLogger(__name__)

INITIAL = Version(0, 0)
PREFILL_TOKENS = 8192
"""Prompt tokens that one step takes in, and that one forward computes."""
PADDING_FLOOR = 256
"""Padding below this many tokens is cheaper than another forward."""
NARROWEST = 8
"""The prompts of seeded requests are padded to a multiple of this many tokens."""
SCORED_LOGITS = 1 << 27
"""Logits that one forward may hold where prompt logprobs are asked for."""


class Engine:
    """A model, its KV rows, and the requests that run on it."""

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int,
        max_running: int = 128,
        kv_on_update: Literal["recompute", "keep"] = "recompute",
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        version: Version = INITIAL,
        base: Path | None = None,
    ) -> None:
        """`base` is the directory that the model was loaded from: adapters are merged with its files."""
        model.eval()
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.base = base
        self.device: torch.device = model.device
        self.link = WeightsReceiver(self.device)
        self.max_model_len = max_model_len
        self.max_running = max_running
        self.kv_on_update = kv_on_update
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.version = version
        self.waiting: deque[Request] = deque()
        self.urgent: deque[Request] = deque()
        """Those that wait in front of the others."""
        self.running: list[Request] = []
        self.paused = False
        self.tokens_sampled = 0
        self._cancelled: deque[Request] = deque()
        self._random = random.Random(seed)
        self._cache = KVCache(model.config.get_text_config().num_hidden_layers, max(2, max_running), max_model_len)

    # What callers do, from any thread

    def submit(
        self, token_ids: list[int], params: SamplingParams, cache_salt: str | None = None, *, urgent: bool = False
    ) -> Request:
        """Put a request in line, an urgent one in front. Its `future` will hold the result."""
        self._check(token_ids, params)
        room = self.max_model_len - len(token_ids)
        request = Request(
            token_ids,
            params,
            max_new=room if params.max_tokens is None else min(room, params.max_tokens),
            eos_token_ids=self.eos_token_ids,
            shared_random=self._random,
            cache_salt=cache_salt,
        )
        (self.urgent if urgent else self.waiting).append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Give a request up; it leaves at the next step."""
        self._cancelled.append(request)

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if not token_ids:
            raise InvalidRequest("token_ids is empty: a prompt needs at least one token")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            bad = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise InvalidRequest(f"token_ids holds {bad}, which is outside the vocabulary of {self.vocab_size}")
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequest(
                f"token_ids has {len(token_ids)} tokens, which leaves no room for a new one: "
                f"prompt and completion together may have max_model_len = {self.max_model_len}"
            )
        problem = params.problem()
        if problem is not None:
            raise InvalidRequest(problem)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) not in (0, 1):
                raise InvalidRequest(f"{name} must be 0 or 1: only the chosen token's is returned, not alternatives")

    # What the engine's own thread does

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._cancelled or (not self.paused and (self.running or self.urgent or self.waiting)))

    @torch.inference_mode()
    def step(self) -> None:
        """Admit, prefill, decode one token each. Errors go to the requests they concern."""
        self._drop_cancelled()
        if self.paused:
            return
        self._admit()
        if self.running:
            with self._isolated(self.running):
                self._decode()

    def update_weights(self, directory: Path, version: Version) -> str:
        """Read a published version and go on with it. Returns its checksum."""
        published = self.read(directory, version)
        self.install(published)
        return published.checksum

    def read(self, directory: Path, version: Version) -> PublishedWeights:
        """Read a published version for this engine; from any thread, while it samples."""
        return read_published(
            directory, version, parameters=self.model.state_dict(), receive=self.link.receive, base=self.base
        )

    @torch.inference_mode()
    def install(self, published: PublishedWeights) -> None:
        """Go on with weights that were read elsewhere, between two steps."""
        install(self.model, published.tensors)
        self.version = published.version
        for request in self.running:
            request.sampled_by(self.version)
        if self.kv_on_update == "recompute":
            with self._isolated(self.running):
                self._fill(self.running)

    def fail_all(self, error: EngineError) -> None:
        """End everything that waits or runs with this error."""
        requests = [*self.running, *self.urgent, *self.waiting]
        self.urgent.clear()
        self.waiting.clear()
        self.running.clear()
        self._cache.release()
        for request in requests:
            if not request.future.done():
                request.fail(error)

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if request.future.done():
                continue
            if request.row < 0:
                (self.urgent if request in self.urgent else self.waiting).remove(request)
            else:
                self._remove([request.row])
            request.fail(RequestCancelled("the request was cancelled"))

    def _admit(self) -> None:
        """Take requests from the line, and fill their rows."""
        admitted = self._take_from_line()
        if not admitted:
            return
        # Those with a seed among themselves: their prompts are computed in another way.
        known = {_prompt_of(request): request for request in self.running if request.cached_with == self.version}
        fresh, copies = [], []
        for request in admitted:
            request.row = len(self.running)
            self.running.append(request)
            request.sampled_by(self.version)
            twin = known.setdefault(_prompt_of(request), request)
            if twin is request or request.lacks_prompt_logprobs or not request.repeats_prompt_of(twin):
                fresh.append(request)
            else:
                copies.append((twin, request))
        with self._isolated(admitted):
            self._fill(fresh)
            self._copy(copies)

    def _take_from_line(self) -> list[Request]:
        taken: list[Request] = []
        budget = PREFILL_TOKENS
        while (line := self.urgent or self.waiting) and len(self.running) + len(taken) < self.max_running:
            budget -= line[0].prompt_length
            if taken and budget < 0:
                break
            taken.append(line.popleft())
        return taken

    def _copy(self, pairs: Sequence[tuple[Request, Request]]) -> None:
        """Give each second request the prompt's keys and values of the first."""
        if pairs:
            length = max(copy.prompt_length for _, copy in pairs) - 1
            self._cache.copy_rows([twin.row for twin, _ in pairs], [copy.row for _, copy in pairs], length)
        for _, copy in pairs:
            copy.cached_with = self.version

    def _fill(self, requests: Sequence[Request]) -> None:
        """Compute keys and values of all tokens but the last, which the next decode step feeds."""
        for request in requests:
            request.cached_with = self.version
        longest = max((len(request.tokens) for request in requests), default=0)
        self._cache.reserve(len(self.running), min(padded_width(longest), self.max_model_len))
        for scored in (False, True):
            chosen = [request for request in requests if request.lacks_prompt_logprobs == scored]
            for width, group in alike_in_length([request for request in chosen if len(request.tokens) > 1]):
                self._prefill(group, min(width, self.max_model_len), scored)

    def _prefill(self, group: list[Request], longest: int, scored: bool) -> None:
        """Fill the rows of requests of similar length, in chunks that bound what a forward holds."""
        budget = min(PREFILL_TOKENS, max(1, SCORED_LOGITS // self.vocab_size)) if scored else PREFILL_TOKENS
        width = max(1, budget // len(group))
        for start in range(0, longest, width):
            end = min(longest, start + width)
            group = [request for request in group if len(request.tokens) - 1 > start]
            if not group:
                break  # the rest is padding
            ids = self._padded([request.tokens[start:end] for request in group], end - start)
            access = Prefill([request.row for request in group], start, end, self.device)
            if not scored:
                self._forward(self.model.base_model, ids, access.positions[None], access)
                continue
            logits = self._forward(self.model, ids, access.positions[None], access).logits
            logprobs = scaled_logprobs(logits, [request.params.temperature for request in group])
            targets = self._padded([request.tokens[start + 1 : end + 1] for request in group], end - start)
            chosen = logprobs.gather(-1, targets[:, :, None])[:, :, 0].tolist()
            for request, values in zip(group, chosen, strict=True):
                assert request.prompt_logprobs is not None
                request.prompt_logprobs += values[: request.prompt_length - 1 - start]

    @property
    def _is_doubled(self) -> bool:
        """A seeded request that is alone runs in two rows on a CPU, where one row is multiplied in another order.

        So it gets the same bits in any company.
        """
        return len(self.running) == 1 and self.running[0].params.seed is not None and self.device.type == "cpu"

    def _decode(self) -> None:
        """Sample the next token of every running request."""
        running = self.running
        lengths = [len(request.tokens) for request in running]
        latest = [request.tokens[-1] for request in running]
        if self._is_doubled:
            lengths, latest = lengths * 2, latest * 2
        self._cache.reserve(len(lengths), max(lengths))
        key_length = min(self._cache.length, -(-max(lengths) // KEY_BUCKET) * KEY_BUCKET)
        positions = torch.tensor(lengths, device=self.device) - 1
        ids = torch.tensor(latest, device=self.device)
        output = self._forward(self.model, ids[:, None], positions[:, None], Decode(positions, key_length))
        uniforms = [request.random.random() for request in running]
        sampled = sample(output.logits[: len(running), -1], [request.params for request in running], uniforms)
        # Token ids and float32 values are exact in float64: one copy to the host carries them all.
        columns = [column.double() for column in sampled if column is not None]
        self._collect(torch.stack(columns, 1).tolist())

    def _collect(self, sampled: list[list[float]]) -> None:
        """Give each request what was sampled for it: token, logprob and, where any truncates, the log of the mass."""
        finished, broken = [], []
        for request, (token, logprob, *log_mass) in zip(self.running, sampled, strict=True):
            if logprob != logprob:
                broken.append(request)
            elif request.add(int(token), logprob, *log_mass):
                finished.append(request)
        self.tokens_sampled += len(sampled) - len(broken)
        for request in broken:
            self._cache.clear_row(request.row)
        if broken and self._is_doubled:
            self._cache.clear_row(1)
        self._remove([request.row for request in (*finished, *broken)])
        for request in finished:
            request.finish()
        for request in broken:
            at = f"weights {self.version} at temperature {request.params.temperature}"
            request.fail(EngineError(f"{at} gave logits that are not finite (NaN or infinity)"))

    def _forward(self, module: Any, ids: torch.Tensor, positions: torch.Tensor, access: Access) -> Any:
        self._cache.access = access
        return module(input_ids=ids, position_ids=positions, past_key_values=self._cache, use_cache=True, access=access)

    def _padded(self, rows: Sequence[list[int]], width: int) -> torch.Tensor:
        return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)

    def _remove(self, rows: Collection[int]) -> None:
        """Let requests go, and close the gaps with the last ones."""
        if not rows:
            return
        leaving = set(rows)
        count = len(self.running) - len(leaving)
        gaps = [row for row in leaving if row < count]
        movers = [request for request in self.running[count:] if request.row not in leaving]
        longest = max((len(request.tokens) for request in movers), default=0)
        self._cache.copy_rows([request.row for request in movers], gaps, longest)
        for row, request in zip(gaps, movers, strict=True):
            self.running[row] = request
            request.row = row
        del self.running[count:]

    @contextmanager
    def _isolated(self, requests: list[Request]) -> Iterator[None]:
        """An exception costs these requests an error, and the engine nothing."""
        concerned = set(requests)
        try:
            yield
        except Exception as error:
            log.exception("a step failed; its %d requests end with an error", len(concerned))
            rows = [request.row for request in self.running if request in concerned]
            if len(rows) == len(self.running):
                self.running.clear()
                self._cache.release()  # running out of memory is the likeliest cause
            else:
                self._remove(rows)
            for request in concerned:
                if not request.future.done():
                    request.fail(EngineError(f"the engine's step failed: {type(error).__name__}: {error}"))


def _prompt_of(request: Request) -> tuple[int, bool]:
    return request.prompt_hash, request.params.seed is not None


def alike_in_length(requests: Iterable[Request]) -> Iterator[tuple[int, list[Request]]]:
    """Groups to prefill together, each with the width to which its prompts are padded, within one forward.

    A request with a seed is padded to a width of its own, so that company changes none of its bits; the others share a
    forward wherever padding is cheaper than another.
    """
    seeded: dict[int, list[Request]] = {}
    group: list[Request] = []
    real = 0
    for request in sorted(requests, key=lambda request: len(request.tokens)):
        length = len(request.tokens)
        if request.params.seed is not None:
            seeded.setdefault(padded_width(length - 1), []).append(request)
            continue
        padded = length * (len(group) + 1)
        if group and (padded > PREFILL_TOKENS or padded > 2 * (real + length) + PADDING_FLOOR):
            yield len(group[-1].tokens) - 1, group
            group, real = [], 0
        group.append(request)
        real += length
    if group:
        yield len(group[-1].tokens) - 1, group
    for width, alike in seeded.items():
        size = max(1, PREFILL_TOKENS // width)
        yield from ((width, alike[start : start + size]) for start in range(0, len(alike), size))


def padded_width(length: int) -> int:
    """At most a quarter more, or 7 tokens. It depends on the prompt alone: so does how its attention is rounded."""
    step = max(NARROWEST, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step
