"""The scheduler: small cases by hand, and random traffic that must leak nothing."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from headrace.inference.embedded import scheduler as scheduler_module
from headrace.inference.embedded.adapters import LoadedAdapter
from headrace.inference.embedded.block_manager import BLOCK_SIZE, BlockManager, blocks_for
from headrace.inference.embedded.request import PENDING, Request, Weights
from headrace.inference.embedded.scheduler import Scheduler, StepPlan
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version

W0, W1 = Weights(Version(0, 0), 0), Weights(Version(0, 1), 1)
CHUNK_TOKENS = 32
Spans = list[tuple[str, int, int]]


class Desk:
    """A scheduler, and requests that get a token whenever all of theirs are computed."""

    def __init__(self, blocks: int = 63, **settings: Any) -> None:
        """`blocks` can be allocated."""
        self.blocks = BlockManager(blocks + 1)
        settings = {
            "max_running": 8,
            "max_prefill_tokens": 64,
            "max_scored_tokens": 1000,
            "prefix_cache": True,
            **settings,
        }
        self.scheduler = Scheduler(self.blocks, **settings)
        self.names: dict[Request, str] = {}
        self.requests: dict[str, Request] = {}

    def ask(
        self,
        name: str,
        prompt: list[int] | int,
        *,
        max_new_tokens: int = 1000,
        urgent: bool = False,
        salt: str | None = None,
        adapter: LoadedAdapter | None = None,
        **params: Any,
    ) -> Request:
        """Append a request to the queue, with these tokens or so many unique ones."""
        if isinstance(prompt, int):
            prompt = [1000 * (len(self.names) + 1) + place for place in range(prompt)]
        request = Request(
            prompt,
            SamplingParams(**params),
            max_new_tokens=max_new_tokens,
            eos_token_ids=(),
            shared_random=random.Random(0),
            cache_salt=salt,
            adapter=adapter,
        )
        self.names[request] = name
        self.requests[name] = request
        (self.scheduler.urgent if urgent else self.scheduler.waiting).append(request)
        return request

    def plan(self, weights: Weights = W0) -> StepPlan:
        plan = self.scheduler.schedule(weights)
        self.check(plan)
        return plan

    def step(self, weights: Weights = W0) -> Spans:
        """Compute a step and return its chunks; finished requests are removed."""
        plan = self.plan(weights)
        spans = self.spans(plan)
        for chunk in plan.chunks:
            request = chunk.request
            if request.lacks_prompt_logprobs and request.prompt_logprobs is not None:
                scores = range(chunk.start + 1, min(chunk.end + 1, request.prompt_length))
                assert len(request.prompt_logprobs) == chunk.start + 1
                request.prompt_logprobs += [-float(place) for place in scores]
        complete = [chunk.request for chunk in plan.chunks if chunk.end == len(chunk.request.tokens)]
        complete += [second for _, second in plan.duplicates]
        assert len(set(complete)) == len(complete)
        self.scheduler.release_from_quarantine(complete)
        for request in complete:
            if request.append(len(request.logprobs), -1.0):
                self.scheduler.remove(request)
                request.finish()
        return spans

    def spans(self, plan: StepPlan) -> Spans:
        return [(self.names[chunk.request], chunk.start, chunk.end) for chunk in plan.chunks]

    def running(self) -> str:
        return "".join(self.names[request] for request in self.scheduler.running)

    def check(self, plan: StepPlan) -> None:
        """Check the invariants after any step."""
        running = self.scheduler.running
        owners = Counter(block for request in self.names for block in request.blocks)
        assert {block for block in range(self.blocks.num_usable + 1) if self.blocks.references[block]} == set(owners)
        assert self.blocks.num_free == self.blocks.num_usable - len(owners)
        assert 0 not in owners
        assert len(running) == len(set(running)) <= self.scheduler._max_running
        assert all(not request.blocks and not request.computed for request in self.names if request not in running)
        written: Counter[tuple[int, int]] = Counter()
        for request, start, end, _ in plan.chunks:
            assert 0 <= start < end <= len(request.tokens)
            assert request in running
            assert len(request.blocks) == blocks_for(request.computed)
            assert end == len(request.tokens) or end % scheduler_module.CHUNK_TOKENS == 0
            written.update((request.blocks[place // BLOCK_SIZE], place % BLOCK_SIZE) for place in range(start, end))
        assert all(count == 1 for count in written.values())  # no slot is written twice
        for first, second in plan.duplicates:
            assert first.tokens == second.tokens
            assert first.computed == second.computed == len(first.tokens)
            full = len(first.tokens) // BLOCK_SIZE
            assert first.blocks[:full] == second.blocks[:full]
            assert not set(first.blocks[full:]) & set(second.blocks[full:])

    def assert_empty(self) -> None:
        assert (self.blocks.num_free, self.running(), self.scheduler.num_waiting) == (self.blocks.num_usable, "", 0)
        assert not self.scheduler.quarantine


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", CHUNK_TOKENS)


def test_a_prompt_is_computed_and_then_one_token_per_step() -> None:
    desk = Desk()
    desk.ask("a", 10, max_new_tokens=3)
    assert [desk.step() for _ in range(4)] == [[("a", 0, 10)], [("a", 10, 11)], [("a", 11, 12)], []]
    assert desk.requests["a"].future.result(timeout=0).token_ids == [0, 1, 2]
    desk.assert_empty()


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    desk = Desk(max_prefill_tokens=64)
    desk.ask("a", 150)
    assert [desk.step() for _ in range(4)] == [
        [("a", 0, 32), ("a", 32, 64)],
        [("a", 64, 96), ("a", 96, 128)],
        [("a", 128, 150)],
        [("a", 150, 151)],
    ]


@pytest.mark.parametrize("others", [0, 1, 5, 31, 33, 50])
def test_chunk_boundaries_do_not_depend_on_other_requests(others: int) -> None:
    desk = Desk(max_prefill_tokens=64)
    if others:
        desk.ask("b", others)
    desk.ask("a", 100)
    ends = [end for _ in range(6) for name, _, end in desk.step() if name == "a"]
    assert ends[:4] == [32, 64, 96, 100]


def test_decode_never_waits_for_prefill() -> None:
    desk = Desk(max_prefill_tokens=32)
    for name in "ab":
        desk.ask(name, 5)
    desk.step()
    desk.ask("c", 90)
    assert desk.step() == [("a", 5, 6), ("b", 5, 6), ("c", 0, 32)]
    assert desk.step() == [("a", 6, 7), ("b", 6, 7), ("c", 32, 64)]


def test_no_request_is_admitted_once_the_budget_is_spent() -> None:
    desk = Desk(max_prefill_tokens=32)
    for name in "abc":
        desk.ask(name, 20)
    assert desk.step() == [("a", 0, 20), ("b", 0, 20)]  # the second begins within the budget
    assert desk.step() == [("a", 20, 21), ("b", 20, 21), ("c", 0, 20)]


def test_prompts_that_are_scored_have_a_budget_of_their_own() -> None:
    desk = Desk(max_prefill_tokens=128, max_scored_tokens=32)
    desk.ask("a", 70, prompt_logprobs=0)
    desk.ask("b", 10)
    assert desk.step() == [("a", 0, 32), ("b", 0, 10)]
    assert desk.step() == [("b", 10, 11), ("a", 32, 64)]
    assert desk.step() == [("b", 11, 12), ("a", 64, 70)]


def test_no_more_than_max_running_run_and_urgent_ones_come_first() -> None:
    desk = Desk(max_running=2)
    for name in "abcd":
        desk.ask(name, 3, max_new_tokens=2)
    for name in "xy":
        desk.ask(name, 3, max_new_tokens=2, urgent=True)
    order = [desk.running() for _ in range(6) if desk.step() is not None]
    assert order == ["xy", "", "ab", "", "cd", ""]


def test_the_last_admitted_request_is_preempted_and_returns_before_waiting_ones() -> None:
    desk = Desk(blocks=4)
    desk.ask("a", 30, max_new_tokens=5)  # two blocks, three from its 33rd token on
    desk.ask("b", 30, max_new_tokens=5)
    desk.ask("c", 3, max_new_tokens=1)
    desk.step()
    assert [desk.step(), desk.step()] == [[("a", 30, 31), ("b", 30, 31)], [("a", 31, 32), ("b", 31, 32)]]
    assert desk.step() == [("a", 32, 33)]  # of its two blocks one is free, which is too little for the other to return
    assert (desk.running(), desk.scheduler.preemptions, desk.scheduler.num_waiting) == ("a", 1, 2)
    assert not desk.requests["b"].blocks
    assert desk.step() == [("a", 33, 34)]
    # Of its two blocks, which could be found, the other took the second: the first is found again.
    assert desk.step() == [("b", 16, 32), ("b", 32, 33), ("c", 0, 3)]
    assert desk.requests["b"].cached_tokens == 0  # of its prompt nothing was, when it came
    assert desk.step() == [("b", 33, 34)]
    desk.assert_empty()


def test_a_request_may_be_alone_with_all_blocks() -> None:
    desk = Desk(blocks=4)
    desk.ask("a", 63, max_new_tokens=1)
    assert desk.step() == [("a", 0, 32), ("a", 32, 63)]
    desk.assert_empty()


def test_admission_leaves_spare_blocks_for_running_requests() -> None:
    desk = Desk(blocks=128)  # one in 64: two
    desk.ask("a", 16 * 100)
    while not desk.requests["a"].has_sampled:
        desk.step()  # 101 blocks, for its first token as well
    desk.step()
    desk.ask("b", 16 * 26)
    desk.step()
    assert desk.running() == "a"  # 27 are free, 2 of them spare
    desk.scheduler.remove(desk.requests["b"])
    desk.ask("c", 16 * 25)
    desk.step()
    assert desk.running() == "ac"


def test_the_first_request_may_use_the_spare_blocks() -> None:
    desk = Desk(blocks=128, max_prefill_tokens=4096)
    desk.ask("a", 16 * 128, max_new_tokens=1)
    desk.step()
    desk.assert_empty()


TEXT = list(range(40))


@pytest.mark.parametrize(
    ("second", "weights", "cached"),
    [
        ({}, W0, 32),
        ({"prompt": TEXT[:32]}, W0, 16),  # one token is always computed, for its logits
        ({"prompt": TEXT[:33]}, W0, 32),
        ({"prompt": [*TEXT[:20], 99, *TEXT[21:]]}, W0, 16),
        ({"prompt": [99, *TEXT[1:]]}, W0, 0),
        ({"salt": "other"}, W0, 0),
        ({"adapter": LoadedAdapter("other", {})}, W0, 0),
        ({"seed": 1}, W0, 0),
        ({"prompt_logprobs": 0}, W0, 0),
        ({}, W1, 0),
        ({}, Weights(Version(0, 0), 1), 0),
    ],
)
def test_a_prefix_is_shared_by_those_with_the_same_weights_salt_and_adapter(
    second: dict[str, Any], weights: Weights, cached: int
) -> None:
    desk = Desk()
    desk.ask("a", TEXT, max_new_tokens=1)
    desk.step()
    request = desk.ask("b", **{"prompt": TEXT, "max_new_tokens": 1, **second})
    [(_, start, _), *_] = desk.step(weights)
    assert start == cached == request.future.result(timeout=0).cached_tokens == desk.scheduler.tokens_cached
    desk.assert_empty()


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    desk = Desk(prefix_cache=False, max_prefill_tokens=128)
    for name in "ab":
        desk.ask(name, TEXT)
    assert desk.step() == [("a", 0, 32), ("a", 32, 40), ("b", 0, 32), ("b", 32, 40)]


def test_what_was_sampled_is_a_prefix_too() -> None:
    desk = Desk()
    first = desk.ask("a", TEXT, max_new_tokens=9)  # 49 tokens, of which the last is not computed
    while not first.future.done():
        desk.step()
    desk.ask("b", [*first.tokens, 7])
    assert desk.step() == [("b", 48, 50)]


def test_a_prefix_is_shared_while_it_is_computed_in_the_same_step() -> None:
    desk = Desk()
    desk.ask("a", TEXT)
    desk.ask("b", TEXT[:36])
    assert desk.step() == [("a", 0, 32), ("a", 32, 40), ("b", 32, 36)]
    assert desk.requests["a"].blocks[:2] == desk.requests["b"].blocks[:2]
    assert desk.blocks.num_free == desk.blocks.num_usable - 4


def test_duplicate_prompts_are_computed_once_and_have_their_own_last_blocks() -> None:
    desk = Desk()
    for name in "abc":
        desk.ask(name, TEXT)
    plan = desk.plan()
    assert desk.spans(plan) == [("a", 0, 32), ("a", 32, 40)]
    assert [(desk.names[first], desk.names[second]) for first, second in plan.duplicates] == [("a", "b"), ("a", "c")]
    assert desk.blocks.num_free == desk.blocks.num_usable - 2 - 3
    assert (desk.scheduler.tokens_computed, desk.scheduler.tokens_cached) == (40, 80)
    assert [desk.requests[name].cached_tokens for name in "abc"] == [0, 40, 40]


def test_duplicate_prompts_of_whole_blocks_share_them_all() -> None:
    desk = Desk()
    for name in "ab":
        desk.ask(name, TEXT[:32])
    desk.step()
    assert desk.blocks.num_free == desk.blocks.num_usable - 2
    assert desk.step() == [("a", 32, 33), ("b", 32, 33)]
    assert desk.blocks.num_free == desk.blocks.num_usable - 4


@pytest.mark.parametrize(
    ("second", "are_duplicates"),
    [
        ({"seed": 2}, True),
        ({}, False),
        ({"seed": 2, "salt": "other"}, False),
        ({"seed": 2, "adapter": LoadedAdapter("other", {})}, False),
        ({"seed": 2, "prompt_logprobs": 0}, False),
        ({"seed": 2, "prompt": [*TEXT[:-1], 99]}, False),
    ],
)
def test_a_seeded_request_duplicates_only_seeded_ones(second: dict[str, Any], are_duplicates: bool) -> None:
    desk = Desk()
    desk.ask("a", TEXT, seed=1)
    desk.ask("b", **{"prompt": TEXT, **second})
    assert bool(desk.plan().duplicates) is are_duplicates


def test_a_prompt_of_several_steps_has_no_duplicates() -> None:
    desk = Desk(max_prefill_tokens=32)
    for name in "ab":
        desk.ask(name, TEXT)
    assert desk.step() == [("a", 0, 32)]
    plan = desk.plan()
    assert desk.spans(plan) == [("a", 32, 40), ("b", 32, 40)]
    assert plan.duplicates == []


def test_preempted_duplicates_count_only_their_prompt_as_cached() -> None:
    desk = Desk(blocks=7, max_prefill_tokens=200)
    for name in "ab":
        desk.ask(name, 31, max_new_tokens=3)  # two blocks each, three for the last step
    for name in "cd":
        desk.ask(name, TEXT[:20], max_new_tokens=9)  # three between them
    for _ in range(3):
        desk.step()
    assert (desk.running(), desk.scheduler.preemptions) == ("", 2)
    [(first, second)] = desk.plan().duplicates
    assert (desk.names[first], desk.names[second], len(second.tokens)) == ("c", "d", 22)
    assert [desk.requests[name].cached_tokens for name in "cd"] == [0, 20]
    assert desk.scheduler.tokens_cached == 20


def test_after_a_failed_step_each_of_its_requests_is_tried_alone_until_it_has_sampled() -> None:
    desk = Desk(max_prefill_tokens=32)
    desk.ask("a", 40)
    desk.ask("b", 3)
    assert desk.step() == [("a", 0, 32)]
    assert desk.spans(desk.plan()) == [("a", 32, 40), ("b", 0, 3)]
    desk.scheduler.isolate([desk.requests["a"], desk.requests["b"]], W0)
    desk.ask("c", 3)
    assert [desk.step() for _ in range(4)] == [
        [("a", 0, 32)],
        [("a", 32, 40)],
        [("b", 0, 3)],
        [("b", 3, 4), ("a", 32, 41), ("c", 0, 3)],  # the first gave its blocks back; full ones were found again
    ]


def test_after_a_request_fails_in_quarantine_the_next_is_computed() -> None:
    desk = Desk()
    for name in "abc":
        desk.ask(name, 3)
    desk.plan()
    desk.scheduler.isolate([desk.requests[name] for name in "abc"], W0)
    assert desk.step() == [("a", 0, 3)]
    assert desk.spans(desk.plan()) == [("b", 0, 3)]
    desk.scheduler.remove(desk.requests["b"])
    assert [desk.step(), desk.step()] == [[("c", 0, 3)], [("c", 3, 4), ("a", 0, 4)]]


def test_nothing_that_was_cached_before_a_failed_step_is_found_after_it() -> None:
    desk = Desk()
    desk.ask("a", TEXT, max_new_tokens=1)
    desk.step()
    desk.ask("b", 3)
    desk.plan()
    desk.scheduler.isolate([desk.requests["b"]], W0)
    desk.step()
    desk.ask("c", TEXT)
    assert ("c", 0, 32) in desk.step()


def test_a_request_in_quarantine_may_have_all_blocks() -> None:
    desk = Desk(blocks=4)
    for name in "ab":
        desk.ask(name, 30)
    desk.step()
    desk.step()
    assert desk.spans(desk.plan()) == [("a", 31, 32), ("b", 31, 32)]
    desk.scheduler.isolate([desk.requests["a"], desk.requests["b"]], W0)
    assert [desk.step(), desk.step()] == [[("a", 0, 32)], [("b", 0, 32)]]
    assert desk.step() == [("a", 32, 33)]  # its two were found again, and a third: the other waits
    assert (desk.running(), desk.scheduler.preemptions) == ("a", 1)


def test_unverified_blocks_are_cleared_and_not_found() -> None:
    desk = Desk(max_prefill_tokens=32)
    request = desk.ask("a", TEXT)
    desk.step()
    blocks = [*request.blocks]
    desk.scheduler.remove(request)
    assert sorted(desk.scheduler.unverified_blocks) == sorted(blocks)
    desk.ask("b", TEXT)
    assert desk.step() == [("b", 0, 32)]


def test_blocks_of_a_request_that_has_sampled_stay_cached() -> None:
    desk = Desk()
    request = desk.ask("a", TEXT)
    desk.step()
    desk.scheduler.remove(request)
    assert desk.scheduler.unverified_blocks == []
    desk.ask("b", TEXT)
    assert desk.step() == [("b", 32, 40)]


def test_a_recomputed_request_stays_running() -> None:
    desk = Desk()
    for name in "ab":
        desk.ask(name, 20)
    desk.step()
    desk.step()
    desk.scheduler.recompute(desk.requests["a"], W0)
    desk.requests["a"].use_weights(W1)
    assert desk.step(W1) == [("b", 21, 22), ("a", 0, 22)]
    assert desk.running() == "ab"


def test_prompt_logprobs_restart_with_the_prompt() -> None:
    desk = Desk(max_prefill_tokens=32)
    request = desk.ask("a", 70, prompt_logprobs=0)
    desk.step()
    desk.scheduler.isolate([request], W0)
    for _ in range(3):
        desk.step()
    assert request.prompt_logprobs == [-float(place) for place in range(70)]


def test_remove_all_returns_running_and_waiting_requests() -> None:
    desk = Desk(max_running=2)
    for name in "abc":
        desk.ask(name, 20)
    desk.ask("u", 20, urgent=True)
    desk.step()
    assert [desk.names[request] for request in desk.scheduler.remove_all()] == ["u", "a", "b", "c"]
    assert (desk.scheduler.running, desk.scheduler.num_waiting) == ([], 0)


def cancel(desk: Desk, rng: random.Random) -> None:
    left = [request for request in desk.names if not request.future.done()]
    if left:
        request = rng.choice(left)
        desk.scheduler.remove(request)
        request.future.set_result(None)  # type: ignore[arg-type]


def update(desk: Desk, weights: Weights) -> None:
    for request in desk.scheduler.running:
        desk.scheduler.recompute(request, weights)


def fail(desk: Desk, weights: Weights) -> None:
    plan = desk.plan(weights)
    concerned = plan.requests
    if len(concerned) > 1:
        desk.scheduler.isolate(concerned, weights)
    elif concerned:
        desk.scheduler.remove(concerned[0])
        concerned[0].future.set_result(None)  # type: ignore[arg-type]


def random_request(desk: Desk, rng: random.Random, longest: int) -> None:
    prompt = [rng.randrange(2)] * rng.randint(1, longest - 30)
    desk.ask(
        str(len(desk.names)),
        prompt,
        max_new_tokens=rng.randint(1, longest - len(prompt)),
        urgent=rng.random() < 0.2,
        salt=rng.choice([None, None, "salt"]),
        seed=rng.choice([None, None, 1]),
        prompt_logprobs=rng.choice([None, None, 0]),
    )


@pytest.mark.parametrize("blocks", [10, 14, 200])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_leaks_no_block_and_everything_ends(seed: int, blocks: int) -> None:
    rng = random.Random(seed)
    desk = Desk(
        blocks, max_running=6, max_prefill_tokens=rng.choice([32, 100]), max_scored_tokens=rng.choice([32, 500])
    )
    longest = 10 * BLOCK_SIZE
    weights = W0
    actions: list[Callable[[], Any]] = [
        *[lambda: random_request(desk, rng, longest)] * 6,
        lambda: cancel(desk, rng),
        lambda: fail(desk, weights),
    ]
    for tick in range(250):
        if rng.random() < 0.3:
            rng.choice(actions)()
        if tick % 50 == 49:
            weights = Weights(Version(0, 0), tick)
            update(desk, weights)
        desk.step(weights)
    steps = 0
    while desk.scheduler.running or desk.scheduler.num_waiting:
        desk.step(weights)
        steps += 1
        assert steps < 20_000
    desk.assert_empty()
    assert all(request.future.done() for request in desk.names)
    assert bool(desk.scheduler.preemptions) == (blocks < 200)
    results = [request.future.result() for request in desk.names if request.has_sampled]
    finished = [result for result in results if result is not None]
    assert len(finished) > 20
    assert all(request.cached_tokens <= request.prompt_length for request in desk.names)
    assert all(result.token_ids == [*range(len(result.token_ids))] for result in finished)


def test_waiting_requests_are_admitted_together_after_the_batching_delay():
    desk = Desk(max_running=200, max_wait_steps=3, max_prefill_tokens=1000, blocks=400)
    for number in range(130):
        desk.ask(f"first {number}", 4)
    desk.step()
    desk.ask("x", 4)
    for _ in range(3):  # one waiting for 130 running is below the ratio
        assert "x" not in [name for name, _, _ in desk.step()]
    assert desk.step()[-1] == ("x", 0, 4)  # after the delay
    desk.ask("y", 4)
    desk.step()
    desk.ask("z", 4)
    desk.ask("w", 4)
    assert [name for name, _, _ in desk.step()[-3:]] == ["y", "z", "w"]  # three for 131


def test_a_free_slot_is_filled_after_the_delay_however_many_requests_wait():
    desk = Desk(max_running=130, max_wait_steps=3, max_prefill_tokens=1000, blocks=400)
    for number in range(130):
        desk.ask(f"first {number}", 4, max_new_tokens=2 if number == 7 else 1000)
    for number in range(100):
        desk.ask(f"waiting {number}", 4)
    desk.step()
    desk.step()  # one request ends
    for _ in range(3):
        assert len(desk.step()) == 129
    assert desk.step()[-1] == ("waiting 0", 0, 4)


def test_urgent_requests_and_those_beside_a_prefill_are_admitted_without_delay():
    desk = Desk(max_running=64, max_wait_steps=3, blocks=200)
    for number in range(16):
        desk.ask(chr(65 + number), 4)
    desk.step()
    desk.ask("u", 4, urgent=True)
    desk.ask("v", 100)
    assert [name for name, _, _ in desk.step()[16:]][:2] == ["u", "v"]
    desk.ask("w", 4)  # the rest of v is computed in this step
    assert [name for name, _, _ in desk.step()[-2:]] == ["v", "w"]


def test_a_step_is_planned_before_the_tokens_of_the_last_one_are_known():
    desk = Desk()
    first = desk.ask("a", 30, max_new_tokens=4)
    desk.ask("b", 5, max_new_tokens=2)
    assert desk.spans(desk.plan()) == [("a", 0, 30), ("b", 0, 5)]
    for request in desk.scheduler.running:
        request.append_pending()
    assert desk.scheduler.can_plan_ahead()
    ahead = desk.plan()
    assert desk.spans(ahead) == [("a", 30, 31), ("b", 5, 6)] and all(chunk.is_decode for chunk in ahead.chunks)
    for request in desk.scheduler.running:
        request.append_pending()
        assert not request.append(50, -1.0)
    assert desk.spans(desk.plan()) == [("a", 31, 32)]  # the last token of b is being sampled
    first.append_pending()
    assert not first.append(51, -1.0)
    desk.scheduler.register_block(first, 1)
    assert first.tokens[30:] == [50, 51, PENDING]
    assert desk.blocks.find(first.block_hashes(2)) == first.blocks[:2]


def test_no_step_is_planned_ahead_where_a_request_might_be_preempted():
    desk = Desk(blocks=7)
    desk.ask("a", 32)
    desk.ask("b", 20)
    desk.plan()
    for request in desk.scheduler.running:
        request.append_pending()
    assert desk.running() == "ab"
    while desk.blocks.num_free > 1:
        desk.blocks.allocate()
    assert desk.scheduler.can_plan_ahead()  # one block is enough: the other request has room in its last one
    desk.blocks.allocate()
    assert not desk.scheduler.can_plan_ahead()


def test_a_stop_token_ends_a_request_whose_next_token_is_in_flight():
    request = Desk().ask("a", 3, stop_token_ids=[9])
    request.use_weights(W0)
    request.append_pending()
    request.append_pending()
    assert not request.append(8, -1.0)
    request.append_pending()
    assert request.append(9, -2.0)
    request.finish()
    assert request.future.result().token_ids == [8, 9]
    assert request.future.result().finish_reason == "stop"
