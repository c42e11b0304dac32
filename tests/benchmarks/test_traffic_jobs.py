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


@pytest.mark.parametrize("name", ["gsm8k", "reasoning", "tools"])
def test_half_of_each_conversation_is_sampled_on_average_and_long_ones_run_more_often(name: str) -> None:
    traffic = TRAFFIC[name]
    lengths = [sampled_tokens(turns) for turns in islice(traffic.conversations(VOCAB), 3000)]
    expected = sum(length**2 for length in lengths) / sum(lengths) / 2
    sampled = [
        each.sampled for seed in range(8) for each in traffic.under_way(traffic.conversations(VOCAB, seed), RUNNING)
    ]
    error = stdev(sampled) / len(sampled) ** 0.5
    assert abs(mean(sampled) - expected) < 4 * error
    assert expected - mean(lengths) / 2 > 4 * error  # the test would see it if all were equally likely to run
