"""What it means that a policy is trained on exactly what was sampled."""

from collections.abc import Sequence

import numpy as np

from headrace.rollout.merge import merge_turns
from headrace.rollout.types import NOT_SAMPLED, ROLES, TRUNCATED, Sample, Turn
from headrace.text.prompt import PromptRenderer
from tests.orchestrator.adversary import Call, Episode
from tests.orchestrator.recording_engine import RecordingEngine
from tests.text.families import KEEPS_HISTORY, Model


def check_turns(engine: RecordingEngine, turns: Sequence[Turn]) -> None:
    """Every turn is one exchange with the engine, to the bit."""
    by_logprob = {e.completion.logprobs[0]: e for e in engine.exchanges if e.completion.logprobs}
    empty = [e.prompt for e in engine.exchanges if not e.completion.token_ids]
    for turn in turns:
        if not len(turn.completion_ids):
            assert turn.prompt_ids.tolist() in empty
            continue
        exchange = by_logprob.pop(float(turn.logprobs[0]))
        completion = exchange.completion
        assert turn.prompt_ids.tolist() == exchange.prompt
        assert turn.completion_ids.tolist() == completion.token_ids
        assert turn.logprobs.tolist() == completion.logprobs
        assert turn.versions.tolist() == completion.steps.tolist()
        assert turn.finish_reason == completion.finish_reason
        if completion.truncated_logprobs is None:
            assert turn.truncated_logprobs is None
        else:
            assert turn.truncated_logprobs is not None
            assert turn.truncated_logprobs.tolist() == completion.truncated_logprobs


def check_samples(turns: Sequence[Turn], samples: Sequence[Sample]) -> None:
    """The samples hold what was sampled once, where it was sampled, and mark nothing else."""
    sampled = [value for turn in turns for value in turn.logprobs.tolist()]
    assert sorted(v for sample in samples for v in sample.logprobs[sample.mask].tolist()) == sorted(sampled)
    for sample in samples:
        assert not sample.logprobs[~sample.mask].any()
        assert (sample.versions[~sample.mask] == NOT_SAMPLED).all()
        assert (sample.versions[sample.mask] != NOT_SAMPLED).all()
        for start, turn, within, length in sample.obs_spans:
            begin = sample.prompt_length + start
            assert not sample.mask[begin : begin + length].any()
            given_ids = turns[turn].prompt_ids[within : within + length]
            assert np.array_equal(sample.token_ids[begin : begin + length], given_ids)
    for turn in turns:
        assert any(_holds(sample, turn) for sample in samples)


def _holds(sample: Sample, turn: Turn) -> bool:
    begin, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)
    truncated = turn.logprobs if turn.truncated_logprobs is None else turn.truncated_logprobs
    return (
        np.array_equal(sample.token_ids[:end], np.concatenate([turn.prompt_ids, turn.completion_ids]))
        and bool(sample.mask[begin:end].all())
        and np.array_equal(sample.logprobs[begin:end], turn.logprobs)
        and np.array_equal(sample.versions[begin:end], turn.versions)
        and (TRUNCATED not in sample.streams or np.array_equal(sample.streams[TRUNCATED][begin:end], truncated))
    )


def is_clean(model: Model, turn: Turn) -> bool:
    """Whether a reply ended as replies do: with its stop token and nothing after it, or cut off anywhere."""
    ids = turn.completion_ids.tolist()
    if set(ids[:-1]) & set(model.stops):
        return False
    try:
        parsed = model.renderer.parse_response(ids, prompt_ids=turn.prompt_ids.tolist())
    except (ValueError, RecursionError):
        return False
    return parsed.reasoning_complete is not False or not ids or ids[-1] not in model.stops


def check_roles(model: Model, call: Call) -> None:
    """What a user or a tool said is marked, each token of it and no other."""
    roles, ids = call.reply.turn.prompt_roles, call.reply.turn.prompt_ids
    assert roles is not None
    for role in ("user", "tool"):
        bodies = [model.body(role, str(m["content"])) for m in call.messages if m["role"] == role]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], roles == ROLES.index(role), [0]])))
        marked = [model.decode(ids[begin:end].tolist()) for begin, end in edges.reshape(-1, 2)]
        marked, bodies = ([text for text in texts if text.strip("\n")] for texts in (marked, bodies))
        for text, body in zip(marked, bodies, strict=True):
            # A line break at an end, or after one of these, may share a token with the format's own.
            shares = body != body.strip("\n") or body[-1] in ".}"
            assert text.strip("\n") == body.strip("\n") if shares else text == body


def check(episode: Episode) -> None:
    model = episode.model
    everything = [turn for talk in episode.talks for turn in talk.turns]
    check_turns(episode.engine, everything)
    check_samples(everything, merge_turns(everything))
    prompts = PromptRenderer(model.renderer)
    for talk in episode.talks:
        samples = merge_turns(talk.turns)
        check_samples(talk.turns, samples)
        if model.name in KEEPS_HISTORY and all(is_clean(model, turn) for turn in talk.turns[:-1]):
            assert len(samples) <= 1
    for call in episode.calls:
        if model.name != "default":
            check_roles(model, call)
        prompts.render([*call.messages, call.reply.message, {"role": "user", "content": "and?"}], call.tools)
