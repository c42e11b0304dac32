"""A policy is trained on exactly the tokens that were sampled, whatever it and its environment write."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.environments.base import Context, Environment, Reply, tasks_of
from headrace.environments.registry import SHIPPED, load_environment
from headrace.environments.script import play
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import (
    ChoiceLogprobs,
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    StructuredOutputs,
    TokenLogprob,
    WeightVersionSpan,
)
from headrace.orchestrator.conversation import Conversation
from headrace.orchestrator.sampler import Sampler
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import ROLES, Message, Rollout, Task
from headrace.text.prompt import PromptRenderer
from headrace.transport.run_dir import RunDir
from tests.environments.pools import pool
from tests.orchestrator.adversary import TOOLS, Adversary, Episode
from tests.orchestrator.exactness import check, check_samples, check_turns
from tests.orchestrator.recording_engine import RecordingEngine, scripted
from tests.orchestrator.stand_ins import StandInEngine
from tests.text.families import FAMILIES, KEEPS_HISTORY, Model, Said, load, write_model

SEEDS = st.randoms(use_true_random=True)
BRIDGING = [name for name in FAMILIES if name != "default"]
FORGETS_THOUGHTS = [name for name in BRIDGING if name not in KEEPS_HISTORY]
SCHEMAS = [tool.schema for tool in TOOLS.values()]
HELLO: list[Message] = [{"role": "user", "content": "hello the cat"}]
AND: list[Message] = [{"role": "user", "content": "and?"}]
CALL = Said("", [("add", {"a": 12})], "hm")
FINE = Said("hello and fine", thought="hm")


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=8, derandomize=True)
@given(rng=SEEDS)
def test_whatever_a_policy_samples_is_trained_on_as_it_was_sampled(name: str, rng: Random):
    check(Episode(load(name), rng).run(steps=5))


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=200, derandomize=True)
@given(rng=SEEDS)
def test_long_episodes_are_trained_on_as_they_were_sampled(name: str, rng: Random):
    check(Episode(load(name), rng).run(steps=9))


# One conversation after another, worked by hand


def line_to(model: Model, *answers: list[int]) -> tuple[RecordingEngine, Conversation]:
    engine = RecordingEngine(scripted(*answers))
    sampler = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=100_000)
    return engine, sampler.open("session", "episode")


def tool_results(reply: Reply, content: str = "15") -> list[Message]:
    """What a tool answers to each call."""
    return [{"role": "tool", "tool_call_id": c.id, "name": c.name, "content": content} for c in reply.tool_calls]


@pytest.mark.parametrize("name", BRIDGING)
async def test_tokens_that_are_not_how_the_text_would_be_rendered_stay_as_they_were(name: str):
    model = load(name)
    canonical = model.written(CALL)
    spelled = model.respelled(canonical, Random(0), share=1.0)
    assert model.decode(spelled) == model.decode(canonical)
    assert spelled != canonical
    engine, line = line_to(model, spelled, model.written(FINE))
    first = await line.chat(HELLO, SCHEMAS)
    second = await line.chat([*HELLO, first.message, *tool_results(first)], SCHEMAS)
    before = engine.exchanges[0].prompt + spelled
    assert engine.exchanges[1].prompt[: len(before)] == before
    (sample,) = merge_turns([first.turn, second.turn])
    assert sample.token_ids[sample.mask].tolist() == spelled + model.written(FINE)


@pytest.mark.parametrize("name", BRIDGING)
@settings(deadline=None, max_examples=5, derandomize=True)
@given(rng=SEEDS)
def test_after_a_canonical_reply_the_prompt_equals_the_rendered_conversation(name: str, rng: Random):
    asyncio.run(_talk_canonically(load(name), rng))


async def _talk_canonically(model: Model, rng: Random) -> None:
    """Tools answer calls; users go on where earlier thoughts do not vanish when they do."""
    thought = rng.choice(("hm", "the cat.\n and 123")) if model.family.thinks else ""
    texts = ("hello the cat", "and 123", "é", "user.")
    said = [
        Said(rng.choice(texts), [("add", {"a": rng.choice((12, -5)), "q": "é and"})] * rng.randint(1, 2), thought)
        if model.family.thinks or rng.random() < 0.5
        else Said(rng.choice(texts))
        for _ in range(3)
    ]
    _, line = line_to(model, *map(model.written, said))
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    for _ in said:
        reply = await line.chat(messages, SCHEMAS)
        news = tool_results(reply, rng.choice(texts)) or AND
        messages += [reply.message, *news]
        rendered = model.renderer.render_ids(messages, tools=SCHEMAS, add_generation_prompt=True)
        bridged = PromptRenderer(model.renderer).extend(reply.turn, news, SCHEMAS)
        assert bridged is not None
        assert bridged.ids == rendered


@pytest.mark.parametrize("name", FORGETS_THOUGHTS)
async def test_where_a_new_question_erases_thoughts_the_conversation_splits(name: str):
    model = load(name)
    engine, line = line_to(model, model.written(CALL), model.written(FINE), model.written(FINE))
    messages = [*HELLO]
    turns = []
    for n in range(3):
        reply = await line.chat(messages, SCHEMAS)
        turns.append(reply.turn)
        messages += [reply.message, *(tool_results(reply) if n == 0 else AND)]
    samples = merge_turns(turns)
    check_turns(engine, turns)
    check_samples(turns, samples)
    assert [int(sample.mask.sum()) for sample in samples] == [
        len(model.written(CALL)) + len(model.written(FINE)),
        len(model.written(FINE)),
    ]
    assert "hm" not in model.decode(samples[1].token_ids[: samples[1].prompt_length].tolist())


@pytest.mark.parametrize("name", KEEPS_HISTORY)
async def test_a_long_conversation_stays_one_sample_where_history_is_kept(name: str):
    model = load(name)
    said = [CALL, FINE, FINE, CALL, FINE]
    _, line = line_to(model, *map(model.written, said))
    messages = [*HELLO]
    turns = []
    for _ in said:
        reply = await line.chat(messages, SCHEMAS)
        turns.append(reply.turn)
        messages += [reply.message, *(tool_results(reply) or AND)]
    (sample,) = merge_turns(turns)
    check_samples(turns, [sample])
    assert len(sample.obs_spans) == 4


@pytest.mark.parametrize("name", BRIDGING)
async def test_a_forged_tool_result_is_the_models_own_writing(name: str):
    model = load(name)
    probe = model.renderer.render_ids(HELLO, tools=SCHEMAS, add_generation_prompt=True)
    call = model.written(CALL)
    result: Any = [{"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "999"}]
    forged = model.renderer.bridge_to_next_turn(probe, call, result)
    assert forged is not None
    completion = forged.token_ids[len(probe) :] + model.written(FINE)
    _, line = line_to(model, completion, model.written(FINE))
    first = await line.chat(HELLO, SCHEMAS)
    assert first.turn.completion_ids.tolist() == completion
    second = await line.chat([*HELLO, first.message, *AND], SCHEMAS)
    samples = merge_turns([first.turn, second.turn])
    check_samples([first.turn, second.turn], samples)
    for turn in (first.turn, second.turn):
        assert turn.prompt_roles is not None
        tool = model.decode(turn.prompt_ids[turn.prompt_roles == ROLES.index("tool")].tolist())
        assert tool == ""


@pytest.mark.parametrize("name", KEEPS_HISTORY)
async def test_a_conversation_branches_twice_from_the_tokens_of_one_reply(name: str):
    model = load(name)
    spelled = model.respelled(model.written(FINE), Random(1))
    engine, line = line_to(model, spelled, model.written(FINE), model.written(CALL))
    first = await line.chat(HELLO)
    begun = [*HELLO, first.message]
    left, right = [await line.chat([*begun, {"role": "user", "content": c}]) for c in ("left", "right")]
    before = engine.exchanges[0].prompt + spelled
    assert [exchange.prompt[: len(before)] for exchange in engine.exchanges[1:]] == [before, before]
    turns = [first.turn, left.turn, right.turn]
    samples = merge_turns(turns)
    check_samples(turns, samples)
    assert len(samples) == 2
    assert not samples[1].mask[: len(before) + 1].any()  # the reply they share is trained once


@pytest.mark.parametrize("name", KEEPS_HISTORY)
async def test_two_agents_who_say_the_same_words_keep_their_own_tokens(name: str):
    model = load(name)
    one, other = model.written(FINE), model.respelled(model.written(FINE), Random(1))
    assert one != other
    _, line = line_to(model, one, other, model.written(FINE), model.written(FINE))
    begun = [await line.chat(HELLO) for _ in range(2)]
    assert begun[0].message == begun[1].message
    for reply in begun:
        following = await line.chat([*HELLO, reply.message, *AND])
        assert len(merge_turns([reply.turn, following.turn])) == 1


@pytest.mark.parametrize("name", KEEPS_HISTORY)
async def test_a_reply_that_an_environment_rewrites_is_rendered_as_rewritten(name: str):
    model = load(name)
    engine, line = line_to(model, model.written(FINE), model.written(FINE))
    reply = await line.chat(HELLO)
    reply.message["content"] = "censored"
    await line.chat([*HELLO, reply.message, *AND])
    text = model.decode(engine.exchanges[1].prompt)
    assert "censored" in text
    assert FINE.text not in text


@pytest.mark.parametrize("name", KEEPS_HISTORY)
async def test_a_conversation_whose_tools_change_is_rendered_with_the_new_ones(name: str):
    model = load(name)
    engine, line = line_to(model, model.written(FINE), model.written(FINE))
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    reply = await line.chat(messages)
    messages += [reply.message, *AND]
    await line.chat(messages, SCHEMAS)
    rendered = model.renderer.render_ids(messages, tools=SCHEMAS, add_generation_prompt=True)
    assert engine.exchanges[1].prompt == rendered


# The same over a socket, and for every environment that ships


class AdversarialEngine(StandInEngine):
    """On a real socket, with an adversary's answers; `said` holds their tokens and logprobs by request."""

    def __init__(self, model: Model, directory: Path, run: RunDir) -> None:
        super().__init__(directory, run)
        self.adversary = Adversary(model, Random(5))
        self.said: list[tuple[list[int], list[int], list[float]]] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=GenerateRequest)
        ids, reason = self.adversary(body.token_ids, body.sampling_params)
        logprobs = [-self.rng.random() for _ in ids]
        content = [TokenLogprob(t, value, f"token_id:{t}") for t, value in zip(ids, logprobs, strict=True)]
        spans = [WeightVersionSpan("0-7", 0, len(ids))]
        self.said.append((body.token_ids, ids, logprobs))
        choice = GenerateChoice(0, ids, reason, ChoiceLogprobs(content), spans)
        return web.Response(body=msgspec.json.encode(GenerateResponse("r", [choice])), content_type="application/json")


async def test_turns_that_came_over_a_socket_are_what_was_sent(tmp_path: Path):
    run, model = RunDir(tmp_path / "run"), load("qwen3-all")
    write_model(tmp_path, model.family)
    async with AdversarialEngine(model, tmp_path, run) as engine:
        client = EngineClient(run.endpoints)
        line = Sampler(client, model.renderer, model.tokenizer, seq_len=100_000).open("session", "episode")
        messages = [*HELLO]
        turns = []
        for _ in range(20):
            reply = await line.chat(messages, SCHEMAS)
            messages += [reply.message, *(tool_results(reply) or AND)]
            turns.append(reply.turn)
        await client.close()
    for turn, (prompt, ids, logprobs) in zip(turns, engine.said, strict=True):
        assert turn.prompt_ids.tolist() == prompt
        assert turn.completion_ids.tolist() == ids
        assert turn.logprobs.tolist() == pytest.approx(logprobs, rel=1e-6)
        assert turn.versions.tolist() == [7] * len(ids)


async def test_turns_that_came_back_from_a_worker_process_are_what_was_sampled():
    model, environment = load("qwen3-all"), load_environment("calculator", {})
    task = tasks_of(environment, "calculator")[0]
    async with pool(identifier="calculator") as workers:
        gold = Gold(environment, task, model)
        (rollout,) = await workers.run(task, gold)
        check_rollouts(gold.engine, [rollout])
        assert len(rollout.samples) == 1
        for seed in range(20):
            await play_adversary(workers, task, model, Random(seed))


@pytest.mark.parametrize(("name", "args"), [("arithmetic", {"terse": True}), ("reverse-text", {}), ("copy", {})])
async def test_what_follows_a_call_counts_where_there_are_no_tools(name: str, args: dict[str, Any]):
    model, environment = load("qwen3-without-thoughts"), load_environment(name, args)
    task = tasks_of(environment, name)[0]
    gold = environment.gold(task, [])
    assert isinstance(gold, str)
    more = '\n<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>\nI have no idea, maybe 7'
    rewards = []
    for text in (gold, gold + more):
        engine = RecordingEngine(scripted(model.encode(f"{text}<|im_end|>")))
        sampler = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=1000)
        (rollout,) = await environment.run(task, sampler.open("session", "episode"))
        rewards.append(sum(rollout.rewards.values()))
    assert rewards[0] == 1.0
    assert rewards[1] < 1.0


NEED_DATA = ("agent", "gsm8k", "math", "strict-math")
ENVIRONMENTS = [name for name in SHIPPED if name not in NEED_DATA]
ARGUMENTS = {"hackable": {"provider": "arithmetic"}}


class Gold:
    """A line to an engine that answers with an environment's own gold replies, in tokens."""

    def __init__(self, environment: Environment, task: Task, model: Model) -> None:
        self.environment = environment
        self.task = task
        self.model = model
        self.engine = RecordingEngine(self._answer)
        self._line: Context = Sampler(self.engine.client, model.renderer, model.tokenizer, seq_len=100_000).open(
            "session", "episode"
        )
        self._messages: Sequence[Message] = ()

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        self._messages = messages
        return await self._line.chat(messages, tools, max_tokens, structured_outputs)

    def _answer(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], str]:
        gold = self.environment.gold(self.task, self._messages)
        message: Message = {"content": gold} if isinstance(gold, str) else gold
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        thought = "hm" if self.model.family.thinks else ""
        return self.model.written(Said(message["content"], calls, thought)), "stop"


async def play_gold(environment: Environment, task: Task, model: Model) -> None:
    gold = Gold(environment, task, model)
    rollouts = await environment.run(task, gold)
    wanted, _ = await play(environment, task, lambda messages: environment.gold(task, messages))
    assert [rollout.rewards for rollout in rollouts] == [rollout.rewards for rollout in wanted]
    check_rollouts(gold.engine, rollouts)
    for rollout in rollouts:
        asked_again = any(message["role"] == "user" for message in rollout.messages[2:])
        if model.name in KEEPS_HISTORY or (model.name in BRIDGING and not asked_again):
            assert len(rollout.samples) == 1


async def play_adversary(environment: Environment, task: Task, model: Model, rng: Random) -> None:
    engine = RecordingEngine(Adversary(model, rng))
    line = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=20_000).open("session", "episode")
    check_rollouts(engine, await environment.run(task, line))


def check_rollouts(engine: RecordingEngine, rollouts: Sequence[Rollout]) -> None:
    assert sum(len(rollout.turns) for rollout in rollouts) == len(engine.exchanges)
    check_turns(engine, [turn for rollout in rollouts for turn in rollout.turns])
    for rollout in rollouts:
        rollout.samples = merge_turns(rollout.turns)
        check_samples(rollout.turns, rollout.samples)


async def play_all(environment: Environment, models: Sequence[str], episodes: int) -> None:
    await environment.start()
    rng = Random(3)
    tasks = tasks_of(environment, "environment")
    for name in models:
        for _ in range(episodes):
            task = rng.choice(tasks)
            await play_gold(environment, task, load(name))
            await play_adversary(environment, task, load(name), rng)
    await environment.close()


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_an_environment_that_ships_returns_what_was_sampled(name: str):
    environment = load_environment(name, ARGUMENTS.get(name, {}))
    await play_all(environment, ("qwen3", "qwen3-all", "llama-3", "glm-4.5", "gpt-oss", "default"), episodes=1)


@pytest.mark.full
@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_an_environment_that_ships_returns_what_was_sampled_by_any_family(name: str):
    await play_all(load_environment(name, ARGUMENTS.get(name, {})), list(FAMILIES), episodes=20)
