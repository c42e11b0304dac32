"""Which tokens a step computes: pure bookkeeping over requests and blocks, without a tensor.

Every request has tokens that are computed (their keys and values are in its blocks) and tokens that are not: its whole
prompt at first, the newest token while it is sampled from, everything again once it has lost its blocks. A step takes
the newest token of all that run and, within a budget, chunks of whatever else there is to compute. Where blocks run
out, the youngest request gives its own back and is computed again later.

Where a step with a prompt costs several without (on a GPU, whose steps of newest tokens are one graph), newcomers wait
a few steps for others to be computed with, unless they are many already.

A chunk ends at a multiple of `CHUNK`, whoever else is there: so company changes no bit of a request with a seed, as
long as it keeps its blocks. For the same reason such a request takes nothing from the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from headrace.inference.embedded.blocks import BLOCK, BlockPool, blocks_for
from headrace.inference.embedded.request import Request, Weights

CHUNK = 512
"""Tokens of a prompt whose attention is computed at once."""
COMPANY = 8
"""One newcomer for this many that run is company enough."""
SPARE = 64
"""One block in this many stays free when a request is let in: those that run will need more."""


class Chunk(NamedTuple):
    """The tokens [start, end) of a request."""

    request: Request
    start: int
    end: int
    is_newest: bool = False
    """Whether it is the newest token of a request whose others were all computed in earlier steps."""


class Plan(NamedTuple):
    """What a step computes, in chunks, and whose prompts come out of that as well."""

    chunks: list[Chunk]
    twins: list[tuple[Request, Request]]
    """(first, second): the second has the first one's prompt, and samples from the same logits."""


class Scheduler:
    """The line, the running requests in the order they came in, and the blocks they hold."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        step_tokens: int,
        scored_tokens: int,
        prefix_cache: bool,
        patience: int = 0,
    ) -> None:
        """`step_tokens` bounds what a step computes beside the newest tokens, `scored_tokens` those with logits.

        `patience` is for how many steps a newcomer waits for others.
        """
        self.pool = pool
        self.line: deque[Request] = deque()
        self.urgent: deque[Request] = deque()
        """Those that wait in front of the others."""
        self.running: list[Request] = []
        self.quarantine: deque[Request] = deque()
        """Running requests that were in a step that failed: each is tried alone until it has sampled."""
        self.unproven: list[int] = []
        """Blocks that were given back and may hold what is not a number: to be cleared before the next forward."""
        self.preemptions = 0
        self.tokens_computed = 0
        self.tokens_cached = 0
        self._max_running = max_running
        self._step_tokens = step_tokens
        self._scored_tokens = scored_tokens
        self._prefix_cache = prefix_cache
        self._patience = patience
        self._waited = 0
        """Steps for which newcomers have been waiting for others."""

    @property
    def waiting(self) -> int:
        return len(self.line) + len(self.urgent)

    @property
    def kv_usage(self) -> float:
        return 1 - self.pool.free / self.pool.count

    def plan(self, weights: Weights) -> Plan:
        """What to compute now, with these weights. Blocks are there for all of it; full ones can be found by others."""
        self._budget, self._scored = self._step_tokens, self._scored_tokens
        plan = Plan([], [])
        if self.quarantine:
            plan.chunks.extend(self._chunks_alone(self.quarantine[0], weights))
            return plan
        for request in self.running:  # it shrinks from its end where blocks run out
            length = len(request.tokens)
            if request.is_proven and length % BLOCK and length < len(request.blocks) * BLOCK:
                request.advance_to(length)  # mostly: its newest token, in a block that has room beyond it
                plan.chunks.append(Chunk(request, length - 1, length, True))
            else:
                plan.chunks.extend(self._chunks(request))
        if self._is_time_for_prompts():
            self._let_others_in(plan, weights)
        return plan

    def _is_time_for_prompts(self) -> bool:
        """Whether those in line shall be computed in this step: others may come whose prompts cost no more."""
        computes_one = self._budget < self._step_tokens
        if computes_one or self.urgent or COMPANY * len(self.line) >= len(self.running):
            self._waited = 0
        else:
            self._waited += bool(self.line)
        if self._waited > self._patience:
            self._waited = 0
        return not self._waited

    def _chunks_alone(self, request: Request, weights: Weights) -> list[Chunk]:
        """What a request computes that nothing shall disturb: nobody else keeps blocks."""
        for other in self.running:
            if other is not request:
                self.compute_again(other, weights)
        return self._chunks(request)

    def _let_others_in(self, plan: Plan, weights: Weights) -> None:
        prompts: dict[object, Request] = {}
        while self._budget > 0 and (request := self._let_in(weights)) is not None:
            prompt = self._prefix_cache and not request.lacks_prompt_logprobs and request.whole_name()
            if prompt in prompts:
                self._follow(prompts[prompt], request)
                plan.twins.append((prompts[prompt], request))
                continue
            plan.chunks.extend(self._chunks(request))
            if prompt and request.computed == len(request.tokens):
                prompts[prompt] = request

    def _follow(self, first: Request, second: Request) -> None:
        """Share all that is full of a prompt that is computed in this step; the rest is copied afterwards."""
        full = len(second.tokens) // BLOCK
        second.blocks = first.blocks[:full]
        for block in second.blocks:
            self.pool.share(block)
        if len(second.tokens) % BLOCK:
            second.blocks.append(self.pool.take())
        second.advance_to(len(second.tokens))
        self._count_cached(second)

    def proven(self, requests: Iterable[Request]) -> None:
        """These have sampled: it was none of them that made a step fail."""
        for request in requests if self.quarantine else ():
            if request in self.quarantine:
                self.quarantine.remove(request)

    def drop(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        if request in self.quarantine:
            self.quarantine.remove(request)
        for place in (self.running, self.urgent, self.line):
            if request in place:
                place.remove(request)
                break
        self._strip(request)

    def compute_again(self, request: Request, weights: Weights) -> None:
        """Nothing of a request counts as computed any more; it keeps its place, and goes on with these weights."""
        self._strip(request)
        request.begin(weights)

    def forget_counts(self) -> None:
        self.preemptions = self.tokens_computed = self.tokens_cached = 0

    def suspect(self, requests: list[Request], weights: Weights) -> None:
        """A step with these failed: none of what is cached is to be trusted, and each of them is tried alone."""
        self.pool.forget_all()
        for request in self.running:
            self.compute_again(request, weights)
        self.quarantine = deque(requests)

    def give_up(self) -> list[Request]:
        """Forget all requests, and their blocks with them; returns them. Nothing can be planned after that."""
        requests = [*self.running, *self.urgent, *self.line]
        for place in (self.running, self.urgent, self.line, self.quarantine):
            place.clear()
        return requests

    def _chunks(self, request: Request) -> list[Chunk]:
        """What a running request computes in this step."""
        length, is_newest = len(request.tokens), request.is_proven
        if not request.computed:
            self._share_prefix(request)
        start, end = request.computed, self._reach(request)
        if end == start or not self._make_room(request, blocks_for(end) - len(request.blocks)):
            return []
        if length - start > 1:
            self._budget -= end - start
            self.tokens_computed += end - start
        if request.lacks_prompt_logprobs:
            self._scored -= end - start
        self._name_full_blocks(request, end)
        request.advance_to(end)
        ends = [*range((start // CHUNK + 1) * CHUNK, end, CHUNK), end]
        return [Chunk(request, *span, is_newest) for span in zip([start, *ends], ends, strict=False)]

    def _reach(self, request: Request) -> int:
        """How far the budget goes; the newest token alone is always within it."""
        start, length = request.computed, len(request.tokens)
        if length - start == 1:
            return length
        budget = min(self._budget, self._scored) if request.lacks_prompt_logprobs else self._budget
        return min(length, (start + budget + CHUNK - 1) // CHUNK * CHUNK) if budget > 0 else start

    def _share_prefix(self, request: Request) -> None:
        request.blocks = self._prefix(request)
        for block in request.blocks:
            self.pool.share(block)
        request.computed = len(request.blocks) * BLOCK
        self._count_cached(request)

    def _count_cached(self, request: Request) -> None:
        if not request.has_sampled:
            request.cached_tokens = request.computed
            self.tokens_cached += request.computed

    def _prefix(self, request: Request) -> list[int]:
        """The blocks that hold its beginning; at least one token is computed, for its logits."""
        found: list[int] = []
        if self._prefix_cache and request.params.seed is None and not request.lacks_prompt_logprobs:
            for index in range((len(request.tokens) - 1) // BLOCK):
                block = self.pool.find(request.block_name(index))
                if block is None:
                    break
                found.append(block)
        return found

    def _name_full_blocks(self, request: Request, end: int) -> None:
        # Before they are computed: a forward writes all keys of a layer before it reads any, so that another request
        # of the same step may share them.
        if self._prefix_cache:
            for index in range(request.computed // BLOCK, end // BLOCK):
                self.pool.name(request.blocks[index], request.block_name(index))

    def _make_room(self, request: Request, needed: int) -> bool:
        """Give a request blocks, if need be those of younger ones; False if it lost its own."""
        while needed > self.pool.free:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        request.blocks += [self.pool.take() for _ in range(needed)]
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._strip(request)
        self.urgent.appendleft(request)
        self.preemptions += 1

    def _let_in(self, weights: Weights) -> Request | None:
        """The next request in line, if there is room for it."""
        line = self.urgent or self.line
        if not line or len(self.running) >= self._max_running:
            return None
        request = line[0]
        request.begin(weights)
        spare = self.pool.count // SPARE if self.running else 0
        shared = sum(map(self.pool.is_owned, self._prefix(request)))
        if self.pool.free - spare < blocks_for(len(request.tokens)) - shared:
            return None
        self.running.append(line.popleft())
        return request

    def _strip(self, request: Request) -> None:
        """Take a request's blocks. What they hold is not to be trusted if nothing came of it."""
        is_proven = request.is_proven
        freed = self.pool.release(request.lose_blocks())
        if not is_proven:
            self.pool.forget(freed)
            self.unproven += freed
