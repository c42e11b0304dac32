"""The scheduler: which tokens of which requests a step computes. Pure bookkeeping, without tensors.

Each request has computed tokens, whose keys and values are in its blocks, and others: its whole prompt at first, the
last token while it decodes, everything again after preemption. A step decodes one token of every running request and,
within a token budget, prefills chunks of all other tokens. If blocks run out, the request that was admitted last is
preempted and recomputed later.

Where a step with prefill costs several without (on a GPU, whose decode steps are one CUDA graph), waiting requests are
admitted in batches: up to `max_wait_steps` later, or as soon as enough of them wait.

A chunk ends at a multiple of `CHUNK_TOKENS`, whatever else is in the batch: so the batch does not change a bit of a
request with a seed, as long as it is not preempted. For the same reason such a request does not use the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace.inference.embedded.block_manager import BLOCK_SIZE, BlockManager, blocks_for
from headrace.inference.embedded.request import PENDING, Request, Weights

CHUNK_TOKENS = 512
"""Prompt tokens whose attention is computed together."""
ADMIT_RATIO = 64
"""Waiting requests are admitted without delay if there is one for this many running ones."""
WATERMARK_DIVISOR = 64
"""One in this many blocks stays free when a request is admitted: running requests will need more."""


class Chunk(NamedTuple):
    """The tokens [start, end) of a request."""

    request: Request
    start: int
    end: int
    is_decode: bool = False
    """Whether it is the last token of a request whose other tokens were all computed in earlier steps."""


class StepPlan(NamedTuple):
    """What a step computes."""

    decodes: list[Request]
    """Requests of which the last token is computed."""
    prefills: list[Chunk]
    duplicates: list[tuple[Request, Request]]
    """(first, second): the second has the prompt of the first, and samples from its logits."""
    drafts: Mapping[Request, Sequence[int]] = {}
    """Guesses of the tokens after the last one, of some requests in `decodes`; a step with drafts has no prefills."""

    @property
    def chunks(self) -> list[Chunk]:
        """All tokens, those of decodes included."""
        decodes = ((request, len(request.tokens)) for request in self.decodes)
        return [*(Chunk(request, length - 1, length, True) for request, length in decodes), *self.prefills]

    @property
    def requests(self) -> list[Request]:
        prefilling = [*(chunk.request for chunk in self.prefills), *(second for _, second in self.duplicates)]
        return [*dict.fromkeys([*self.decodes, *prefilling])]


class Scheduler:
    """The waiting queues, the running requests in the order of admission, and their blocks."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_running: int,
        max_prefill_tokens: int,
        max_scored_tokens: int,
        prefix_cache: bool,
        max_wait_steps: int = 0,
    ) -> None:
        """`max_prefill_tokens` bounds the prefill of a step, `max_scored_tokens` its tokens with prompt logprobs."""
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.urgent: deque[Request] = deque()
        """Waiting requests that are admitted before the others: urgent and preempted ones."""
        self.running: list[Request] = []
        self.quarantine: deque[Request] = deque()
        """Running requests of a failed step: each is computed alone until it has sampled."""
        self.unverified_blocks: list[int] = []
        """Freed blocks that may hold NaN: to be cleared before the next forward."""
        self.preemptions = 0
        self.tokens_computed = 0
        self.tokens_cached = 0
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._max_scored_tokens = max_scored_tokens
        self._prefix_cache = prefix_cache
        self._max_wait_steps = max_wait_steps
        self._steps_waited = 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.urgent)

    @property
    def kv_usage(self) -> float:
        return 1 - self.blocks.num_free / self.blocks.num_usable

    def can_plan_ahead(self) -> bool:
        """Return whether a step can be planned before the last one's tokens are known: all requests decode, and no
        request has to be preempted."""
        if self.quarantine or any(request.tokens[-1] != PENDING for request in self.running):
            return False
        free = self.blocks.num_free
        return free >= len(self.running) or free >= sum(
            len(request.tokens) > len(request.blocks) * BLOCK_SIZE for request in self.running
        )

    def register_block(self, request: Request, index: int) -> None:
        """Register a block if all its tokens are computed: one whose last token was not known when the step that
        computes it was planned."""
        if self._prefix_cache and request.computed >= (index + 1) * BLOCK_SIZE:
            self.blocks.register(request.blocks[index], request.block_hashes(index + 1)[-1])

    def reserve_draft(self, request: Request, count: int) -> int:
        """Allocate the blocks of a draft of `count` tokens, and return how many of them have one: drafts do not preempt
        requests, or use the last free blocks."""
        missing = blocks_for(len(request.tokens) + count) - len(request.blocks)
        if missing > 0:
            spare = max(0, self.blocks.num_free - len(self.running))
            request.blocks += [self.blocks.allocate() for _ in range(min(missing, spare))]
        return min(count, len(request.blocks) * BLOCK_SIZE - len(request.tokens))

    def schedule(self, weights: Weights) -> StepPlan:
        """Plan a step with these weights, allocate its blocks and register the full ones."""
        self._prefill_budget, self._scored_budget = self._max_prefill_tokens, self._max_scored_tokens
        plan = StepPlan([], [], [])
        if self.quarantine:
            request = self.quarantine[0]
            for other in self.running:
                if other is not request:
                    self.recompute(other, weights)
            self._plan_running([request], plan)
            return plan
        self._plan_running(self.running, plan)
        if self._is_time_to_admit():
            self._admit_waiting(plan, weights)
        return plan

    def _plan_running(self, requests: list[Request], plan: StepPlan) -> None:
        """Plan one token of each request that decodes, and as much prefill of the others as the budgets allow."""
        decodes = plan.decodes
        for request in requests:  # preemption removes requests from its end
            tokens = request.tokens
            length = len(tokens)
            if length >= request.max_length:
                continue  # its last token is being sampled
            if not (request.is_verified or tokens[-1] == PENDING):
                plan.prefills.extend(self._plan_chunks(request))
            elif length % BLOCK_SIZE and length < len(request.blocks) * BLOCK_SIZE:
                request.computed = length  # the common case: decode within the last block
                request.is_verified = False
                decodes.append(request)
            elif self._plan_chunks(request):
                decodes.append(request)

    def _is_time_to_admit(self) -> bool:
        """Return whether waiting requests are admitted now, or a later step may prefill more of them together."""
        has_prefill = self._prefill_budget < self._max_prefill_tokens
        admissible = min(len(self.waiting), self._max_running - len(self.running))
        if has_prefill or self.urgent or ADMIT_RATIO * admissible >= len(self.running):
            self._steps_waited = 0
        else:
            self._steps_waited += admissible > 0
        if self._steps_waited > self._max_wait_steps:
            self._steps_waited = 0
        return not self._steps_waited

    def _admit_waiting(self, plan: StepPlan, weights: Weights) -> None:
        """Admit waiting requests, and plan their prefill; equal prompts are computed once."""
        prompts: dict[object, Request] = {}
        while self._prefill_budget > 0 and (request := self._admit(weights)) is not None:
            prompt = self._prefix_cache and not request.lacks_prompt_logprobs and request.prompt_hash()
            if prompt in prompts:
                self._share_prompt(prompts[prompt], request)
                plan.duplicates.append((prompts[prompt], request))
                continue
            plan.prefills.extend(self._plan_chunks(request))
            if prompt and request.computed == len(request.tokens):
                prompts[prompt] = request

    def _admit(self, weights: Weights) -> Request | None:
        """Move the next waiting request to the running ones, if there are blocks for it."""
        queue = self.urgent or self.waiting
        if not queue or len(self.running) >= self._max_running:
            return None
        request = queue[0]
        request.use_weights(weights)
        watermark = self.blocks.num_usable // WATERMARK_DIVISOR if self.running else 0
        shared = sum(self.blocks.references[block] > 0 for block in self._cached_prefix(request))
        if self.blocks.num_free - watermark < blocks_for(len(request.tokens)) - shared:
            return None
        self.running.append(queue.popleft())
        return request

    def _share_prompt(self, first: Request, second: Request) -> None:
        """Share the full blocks of a prompt that is computed in this step; the partial one is copied afterwards."""
        second.blocks = first.blocks[: len(second.tokens) // BLOCK_SIZE]
        for block in second.blocks:
            self.blocks.share(block)
        if len(second.tokens) % BLOCK_SIZE:
            second.blocks.append(self.blocks.allocate())
        second.mark_computed(len(second.tokens))
        self._count_cached(second)

    def release_from_quarantine(self, requests: Iterable[Request]) -> None:
        """Let requests that have sampled alone be computed with others again."""
        for request in requests if self.quarantine else ():
            if request in self.quarantine:
                self.quarantine.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a request from every queue and free its blocks."""
        if request in self.quarantine:
            self.quarantine.remove(request)
        for queue in (self.running, self.urgent, self.waiting):
            if request in queue:
                queue.remove(request)
                break
        self._free_blocks(request)

    def recompute(self, request: Request, weights: Weights) -> None:
        """Free the blocks of a running request, which stays running and is computed again with these weights."""
        self._free_blocks(request)
        request.use_weights(weights)

    def recompute_all(self, weights: Weights) -> None:
        """Recompute all running requests, and empty the prefix cache."""
        self.blocks.evict_all()
        for request in self.running:
            self.recompute(request, weights)

    def isolate(self, requests: Iterable[Request], weights: Weights) -> None:
        """Compute each of these requests alone until it has sampled; nothing in the cache is trusted."""
        self.recompute_all(weights)
        self.quarantine = deque(requests)

    def remove_all(self) -> list[Request]:
        """Remove and return all requests; nothing can be scheduled afterwards."""
        requests = [*self.running, *self.urgent, *self.waiting]
        for queue in (self.running, self.urgent, self.waiting, self.quarantine):
            queue.clear()
        return requests

    def reset_counters(self) -> None:
        self.preemptions = self.tokens_computed = self.tokens_cached = 0

    def _plan_chunks(self, request: Request) -> list[Chunk]:
        """Return what a running request computes in this step, and allocate its blocks, as the budgets allow."""
        length = len(request.tokens)
        if not request.computed:
            request.blocks = self._cached_prefix(request)
            for block in request.blocks:
                self.blocks.share(block)
            request.computed = len(request.blocks) * BLOCK_SIZE
            self._count_cached(request)
        start = request.computed
        end = length
        if length - start > 1:  # one token is always within the budget
            budget = self._prefill_budget
            if request.lacks_prompt_logprobs:
                budget = min(budget, self._scored_budget)
            aligned = (start + budget + CHUNK_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS
            end = min(length, aligned) if budget > 0 else start
        if end == start or not self._allocate(request, blocks_for(end) - len(request.blocks)):
            return []
        if length - start > 1:
            self._prefill_budget -= end - start
            self.tokens_computed += end - start
        if request.lacks_prompt_logprobs:
            self._scored_budget -= end - start
        if self._prefix_cache and request.tokens[-1] != PENDING:
            # Before they are computed: a forward writes all keys of a layer before it reads any, so that another
            # request of the same step may share them.
            hashes = request.block_hashes(end // BLOCK_SIZE)
            for index in range(start // BLOCK_SIZE, len(hashes)):
                self.blocks.register(request.blocks[index], hashes[index])
        request.mark_computed(end)
        ends = [*range((start // CHUNK_TOKENS + 1) * CHUNK_TOKENS, end, CHUNK_TOKENS), end]
        return [Chunk(request, *span) for span in zip([start, *ends], ends, strict=False)]

    def _count_cached(self, request: Request) -> None:
        """Count the tokens that a request takes from the prefix cache, unless it is computed again."""
        if not request.has_sampled:
            request.cached_tokens = request.computed
            self.tokens_cached += request.computed

    def _cached_prefix(self, request: Request) -> list[int]:
        """Return the cached blocks of a request's first tokens; at least one token is left to compute."""
        if not self._prefix_cache or request.params.seed is not None or request.lacks_prompt_logprobs:
            return []
        return self.blocks.find(request.block_hashes((len(request.tokens) - 1) // BLOCK_SIZE))

    def _allocate(self, request: Request, count: int) -> bool:
        """Give a request blocks, preempting the requests admitted last; False if it was preempted itself."""
        while count > self.blocks.num_free:
            preempted = self.running.pop()
            self._free_blocks(preempted)
            self.urgent.appendleft(preempted)
            self.preemptions += 1
            if preempted is request:
                return False
        request.blocks += [self.blocks.allocate() for _ in range(count)]
        return True

    def _free_blocks(self, request: Request) -> None:
        """Release a request's blocks; those that may hold NaN leave the prefix cache, too."""
        is_verified = request.is_verified
        freed = self.blocks.release(request.reset_computed(), evict=not is_verified)
        if not is_verified:
            self.unverified_blocks += freed
