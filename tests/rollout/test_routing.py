"""Routing of action tokens (spec, "Hooks")."""

import math

import numpy as np
import pytest

from headrace.rollout.routing import route_actions, training_problem
from headrace.rollout.types import Sample


def observed_sample() -> Sample:
    """A prompt of two, two sampled tokens, an observation, a sampled token."""
    return Sample([1, 2, 3, 4, 5, 6], [False, False, True, True, False, True], [0.0] * 6, [-1, -1, 0, 0, -1, 0], 2)


def test_rl_stamps_nothing():
    sample = observed_sample()
    route_actions(sample, "rl")
    assert sample.streams == {}


@pytest.mark.parametrize("component", ["ce", "ref_kl"])
def test_another_component_takes_the_sampled_tokens_from_rl(component: str):
    sample = observed_sample()
    route_actions(sample, component)
    assert sample.streams["rl_weights"].tolist() == [0] * 6
    assert sample.streams[f"{component}_weights"].tolist() == [0, 0, 1, 1, 0, 1]
    assert set(sample.streams) == {"rl_weights", f"{component}_weights"}
    assert all(stream.dtype == np.float32 for stream in sample.streams.values())


def test_weights_that_an_algorithm_wrote_stay():
    sample = observed_sample()
    sample.set_stream("ce_weights", [0, 0, 0.5, 0, 0.1, 0])  # a sampled token of its own, and an observed one
    sample.set_stream("rl_weights", [0, 0, 0, 0.25, 0, 0])
    route_actions(sample, "ce")
    assert sample.streams["ce_weights"].tolist() == pytest.approx([0, 0, 0.5, 0, 0.1, 0])
    assert sample.streams["rl_weights"].tolist() == [0, 0, 0, 0.25, 0, 0]


def test_weights_on_observations_alone_leave_the_sampled_tokens_at_one():
    sample = observed_sample()
    sample.set_stream("ce_weights", [0, 0, 0, 0, 0.1, 0])
    route_actions(sample, "ce")
    assert sample.streams["ce_weights"].tolist() == pytest.approx([0, 0, 1, 1, 0.1, 1])


@pytest.mark.parametrize("component", ["ce", "ref_kl"])
def test_a_sample_that_an_algorithm_gave_no_weight_at_all_is_left_out(component: str):
    name, sample = f"{component}_weights", observed_sample()
    sample.set_stream(name, [0] * 6)
    route_actions(sample, component)
    assert sample.streams[name].tolist() == [0] * 6
    assert not sample.streams["rl_weights"].any()


def test_other_streams_are_left_alone():
    sample = observed_sample()
    sample.set_stream("ce_weights", [0, 0, 0, 0, 0.1, 0])
    sample.set_stream("advantages", [0, 0, 1, 1, 1, 1])
    route_actions(sample, "ref_kl")
    assert sample.streams["ce_weights"].tolist() == pytest.approx([0, 0, 0, 0, 0.1, 0])
    assert sample.streams["advantages"].tolist() == [0, 0, 1, 1, 1, 1]
    assert sample.streams["ref_kl_weights"].tolist() == [0, 0, 1, 1, 0, 1]


def test_routing_twice_is_routing_once():
    sample = observed_sample()
    route_actions(sample, "ce")
    once = {name: stream.copy() for name, stream in sample.streams.items()}
    route_actions(sample, "ce")
    assert sample.streams.keys() == once.keys()
    assert all(np.array_equal(sample.streams[name], stream) for name, stream in once.items())


@pytest.mark.parametrize(
    ("streams", "why"),
    [
        ({}, "3 tokens are in the rl loss and have no advantages"),
        ({"rl_weights": [0, 0, 0, 1, 0, 0]}, "1 tokens are in the rl loss and have no advantages"),
        ({"rl_weights": [1, 1, 0, 0, 1, 0]}, ""),  # none that was sampled
        ({"rl_weights": [0] * 6}, ""),
        ({"advantages": [0.5] * 6}, ""),
        ({"advantages": [0, 0, math.nan, 0, 0, 0]}, "advantages of a token is nan"),
        ({"advantages": [math.nan, 0, 0, 0, 0, 0]}, ""),  # nothing trains it
        ({"advantages": [0.5] * 6, "rl_weights": [0, 0, math.inf, 0, 0, 0]}, "rl_weights of a token is inf"),
        ({"rl_weights": [0] * 6, "ce_weights": [0, 0, 0, 0, math.nan, 0]}, "ce_weights of a token is nan"),
        (
            {"rl_weights": [0] * 6, "ref_kl_weights": [0, 0, 1, 1, 0, 1]},
            "3 tokens are in the ref_kl loss and have no ref_logprobs",
        ),
        ({"rl_weights": [0] * 6, "ref_kl_weights": [0, 0, 1, 0, 0, 0], "ref_logprobs": [-1.0] * 6}, ""),
        (
            {"rl_weights": [0] * 6, "ref_kl_weights": [0, 0, 1, 0, 0, 0], "ref_logprobs": [0, 0, -math.inf, 0, 0, 0]},
            "ref_logprobs of a token is -inf",
        ),
    ],
)
def test_what_a_loss_would_lack_is_said(streams: dict[str, list[float]], why: str):
    sample = observed_sample()
    for name, values in streams.items():
        sample.set_stream(name, values)
    assert training_problem(sample) == why


@pytest.mark.parametrize(("weights", "why"), [([1.0] * 6, "the sampling logprob of a token is nan"), ([0] * 6, "")])
def test_a_token_that_was_sampled_with_no_number_is_not_trained(weights: list[float], why: str):
    sample = observed_sample()
    sample.logprobs[3] = math.nan
    sample.set_stream("advantages", [0.5] * 6)
    sample.set_stream("rl_weights", weights)
    assert training_problem(sample) == why
