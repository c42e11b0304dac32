"""The requests of the traffic benchmark."""

import random
from itertools import islice
from statistics import mean, stdev

import pytest
from benchmarks.inference.traffic_jobs import TRAFFIC, Conversation, sampled_tokens

VOCAB = 100
RUNNING = 256


def context_tokens(turns: Conversation) -> int:
    return sum(len(turn.tokens) + turn.completion for turn in turns)


@pytest.mark.parametrize("name", ["gsm8k", "tools"])
def test_traffic_starts_in_the_middle_of_conversations(name: str) -> None:
    conversations = TRAFFIC[name].conversations(VOCAB)
    under_way = TRAFFIC[name].under_way(conversations, RUNNING)
    assert len({each.number for each in under_way}) == RUNNING
    for each in under_way:
        rest = each.rest(random.Random(0), VOCAB)
        assert sampled_tokens(rest) == sampled_tokens(each.turns) - each.sampled > 0
        assert context_tokens(rest) == context_tokens(each.turns)
    assert any(each.sampled for each in under_way)


@pytest.mark.parametrize("name", ["gsm8k", "reasoning"])
def test_conversations_run_at_one_moment_in_proportion_to_their_lengths(name: str) -> None:
    traffic = TRAFFIC[name]
    lengths = [sampled_tokens(turns) for turns in islice(traffic.conversations(VOCAB), 8000)]
    expected = sum(length**2 for length in lengths) / sum(lengths)
    running = [sampled_tokens(each.turns) for each in traffic.under_way(traffic.conversations(VOCAB), RUNNING)]
    error = stdev(running) / RUNNING**0.5
    assert abs(mean(running) - expected) < 4 * error
    assert expected - mean(lengths) > 4 * error  # the test can fail
