"""vLLM's own metrics, as far as an engine's state needs them: the sum over its engines of each name."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import msgspec

_LINE = re.compile(r"vllm:(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)")
_REASON = re.compile(r'finished_reason="(\w+)"')


class Metrics(msgspec.Struct):
    """`preemptions` has those, too, whom an update of the weights moved aside: see `Preemptions`."""

    running: int = 0
    kv_usage: float = 0.0
    tokens_sampled: int = 0
    tokens_computed: int = 0
    tokens_cached: int = 0
    preemptions: int = 0
    finished: dict[str, int] = {}


def read_metrics(text: str) -> Metrics:
    """Out of Prometheus' text format."""
    totals: defaultdict[str, float] = defaultdict(float)
    finished: Counter[str] = Counter()
    engines = 0
    for line in text.splitlines():
        if (found := _LINE.match(line)) is None:
            continue
        name, value = found["name"], float(found["value"])
        totals[name] += value
        engines += name == "kv_cache_usage_perc"
        if name == "request_success_total" and (reason := _REASON.search(found["labels"])) is not None:
            finished["cancelled" if reason[1] == "abort" else reason[1]] += int(value)
    cached = int(totals["prefix_cache_hits_total"])
    return Metrics(
        running=int(totals["num_requests_running"]),
        kv_usage=totals["kv_cache_usage_perc"] / max(engines, 1),
        tokens_sampled=int(totals["generation_tokens_total"]),
        tokens_computed=max(0, int(totals["prompt_tokens_total"]) - cached),
        tokens_cached=cached,
        preemptions=int(totals["num_preemptions_total"]),
        finished={reason: count for reason, count in finished.items() if count},
    )


class Preemptions:
    """Requests that lost their place for want of room.

    vLLM also counts those that it moved aside when its cache was emptied for new weights; it does so when the next
    token of each comes. As many as were running are therefore taken off what it counts from then on.
    """

    def __init__(self) -> None:
        self.count = 0
        self._seen = 0
        self._expected = 0

    def expect(self, running: int, most: int) -> None:
        """So many are moved aside. Of those before, some may be to come yet; more than `most` there cannot be."""
        self._expected = min(self._expected + running, most)

    def follow(self, total: int) -> None:
        """What vLLM has counted by now."""
        new, self._seen = total - self._seen, total
        ours = min(new, self._expected)
        self._expected -= ours
        self.count += new - ours
