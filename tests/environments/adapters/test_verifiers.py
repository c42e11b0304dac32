"""Tasksets of verifiers run as they are, and what comes of them is trained on as it was sampled."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.environments.base import Environment, EpisodeError, PromptTooLong, Reply, Task, ToolCall, tasks_of
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.script import AnswerFunction, as_reply, call_tool, play
from headrace.errors import BadInput
from headrace.observe.metrics import read_metrics
from headrace.orchestrator.sampler import Sampler
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Message, Rollout
from headrace.text.messages import untrained_reply
from headrace.tools.probe.completions import COMPLETIONS, ChatState
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import headrace, write_run_file
from tests.environments.pools import Echo, Failing, Silent, pool
from tests.orchestrator.adversary import Adversary
from tests.orchestrator.exactness import check_samples, check_turns
from tests.orchestrator.recording_engine import RecordingEngine, scripted
from tests.refusals import refused
from tests.text.families import FAMILIES, KEEPS_HISTORY, Said, load

MODULE = "tests.environments.adapters.verifiers_tasksets"
GUESS = {"env": {"id": f"{MODULE}:GuessEnv"}}
DEBATE = {"env": {"id": f"{MODULE}:DebateEnv"}}


def environment_of(name: str, **args: Any) -> Environment:
    return load_environment(f"verifiers:{MODULE}:{name}", args)


@asynccontextmanager
async def playing(name: str, **args: Any) -> AsyncIterator[tuple[Environment, Task]]:
    """A taskset that has started, and its first task."""
    environment = environment_of(name, **args)
    await environment.start()
    try:
        yield environment, tasks_of(environment, name)[0]
    finally:
        await environment.close()


async def played(name: str, *replies: Message | str | Reply, **args: Any) -> list[Rollout]:
    """One episode with these replies."""
    async with playing(name, **args) as (environment, task):
        return (await play(environment, task, in_order(*replies)))[0]


def in_order(*replies: Message | str | Reply) -> AnswerFunction:
    left = iter(replies)
    return lambda messages: next(left)


def cut_off(text: str) -> Reply:
    reply = as_reply(text)
    reply.turn.finish_reason = "length"
    return reply


# Tasks


def test_tasks_are_json_with_keys_that_do_not_change():
    tasks = [tasks_of(environment_of("Reverse"), "words") for _ in range(2)]
    assert [task.key for task in tasks[0]] == [task.key for task in tasks[1]]
    assert len({task.key for task in tasks[0]}) == 3
    assert tasks[0][0].data["data"] == {
        "idx": 0,
        "prompt": "Reverse hello",
        "system_prompt": "Be brief.",
        "answer": "olleh",
    }


def test_a_taskset_without_end_is_bounded_and_keeps_its_own_keys():
    with refused(key="args.select"):
        environment_of("Endless")
    some = environment_of("Endless", select={"include": {"idx": "10:100"}, "limit": 3})
    assert [task.key for task in tasks_of(some, "endless")] == ["word-01", "word-11", "word-21"]


def test_a_module_is_known_by_what_it_exports():
    environment = load_environment(f"verifiers:{MODULE}", {"words": 2})
    assert len(tasks_of(environment, "words")) == 2


# What an episode comes to


async def test_one_answer_earns_weighted_rewards_by_name():
    (rollout,) = await played("Reverse", "olleh")
    assert rollout.rewards == {"right": 1.0, "short": 0.5, "said": 0.5}
    assert rollout.metrics == {"letters": 5.0}
    assert (rollout.agent, rollout.trainable, rollout.truncated, rollout.stop_reason) == ("policy", True, False, "")
    assert rollout.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Reverse hello"},
        {"role": "assistant", "content": "olleh"},
    ]


async def test_settings_of_the_taskset_reweigh_a_reward():
    task = {"rewards": {"right": {"weight": 3.0}}}
    (rollout,) = await played("Reverse", "olleh", words=1, task=task)
    assert rollout.rewards["right"] == 3.0


async def test_the_environments_own_code_is_the_user_of_several_turns():
    (rollout,) = await played("Guess", "a", "z", "k", **GUESS)
    assert rollout.agent == "player"
    assert rollout.rewards == {"found": 1.0}
    assert [message["content"] for message in rollout.messages[1:]] == [
        "Guess a letter.", "a", "later", "z", "earlier", "k",
    ]  # fmt: skip
    assert len(rollout.turns) == 3
    assert (rollout.truncated, rollout.stop_reason) == (False, "")


async def test_an_agents_own_limit_bounds_its_replies():
    model = load("qwen3-without-thoughts")
    engine = RecordingEngine(scripted(model.written(Said("olleh"))))
    async with playing("Reverse", env={"agent": {"sampling": {"max_tokens": 7}}}) as (environment, task):
        line = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=1000).open("session", "episode")
        await environment.run(task, line)
    assert engine.exchanges[0].sampling.max_tokens == 7


async def test_limits_and_stops_end_a_run():
    (limited,) = await played("Guess", *"abcdefgh", **GUESS)
    assert (len(limited.turns), limited.stop_reason, limited.truncated) == (4, "max_turns", True)
    (stopped,) = await played("Guess", "a", "damn", "k", **GUESS)
    assert (len(stopped.turns), stopped.stop_reason, stopped.truncated) == (2, "swears", False)
    assert stopped.rewards == {"found": 0.0}


async def test_what_all_episodes_share_is_opened_and_closed_once():
    from tests.environments.adapters.verifiers_tasksets import GuessEnv

    before = GuessEnv.started
    async with playing("Guess", **GUESS) as (environment, task):
        for _ in range(2):
            await play(environment, task, in_order("k"))
        assert (GuessEnv.started, GuessEnv.stopped) == (before + 1, before)
    assert GuessEnv.stopped == before + 1


async def test_an_agent_plays_the_user_and_is_not_trained():
    rollouts = await played("Reverse", "Reverse it for me", "olleh", "###DONE###", env={"id": "user-sim"})
    assert {rollout.agent: rollout.trainable for rollout in rollouts} == {"assistant": True, "user": False}
    (assistant,) = [rollout for rollout in rollouts if rollout.trainable]
    assert assistant.rewards["right"] == 1.0
    assert assistant.metrics["user_turns"] == 2.0
    assert [m["content"] for m in assistant.messages] == ["Be brief.", "Reverse it for me", "olleh"]


async def test_hooks_before_and_after_a_run_have_a_runtime():
    (rollout,) = await played("Broken", "hello")
    assert rollout.rewards == {"right": 1.0}


async def test_hooks_rewrite_what_is_asked_and_what_is_answered():
    (rollout,) = await played("Hooked", "k")
    assert rollout.messages[0]["content"] == "Guess please"
    (censored,) = await played("Hooked", "the secret")
    assert censored.messages[-1]["content"] == "..."
    assert censored.turns == []  # the model did not sample that
    (silent,) = await played("Hooked", "")
    assert silent.stop_reason == "silent"


# Tools


async def test_a_toolset_is_called_in_this_process():
    replies = (call_tool("add", a=17, b=25), call_tool("diary_note", text="x"), "42")
    async with playing("Sums") as (environment, task):
        (rollout,), script = await play(environment, task, in_order(*replies))
    names = [schema["function"]["name"] for schema in script.calls[0][1]]
    assert names == ["diary_note", "add"]
    add = script.calls[0][1][1]["function"]
    assert add["description"] == "Add two numbers."
    assert set(add["parameters"]["properties"]) == {"a", "b"}
    texts = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert texts == ["sum of 42: 42", "line 1"]
    assert rollout.metrics == {"tool_calls": 2, "tool_errors": 0, "calls": 1.0, "lines": 1.0}
    assert rollout.rewards == {"right": 1.0}


async def test_a_failing_call_returns_an_error_and_changes_no_state():
    replies = (call_tool("add", a=-1), call_tool("add", a="many"), call_tool("subtract", a=1), "42")
    (rollout,) = await played("Sums", *replies)
    texts = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert texts[0] == "Error executing tool add: too small"
    assert "valid integer" in texts[1]
    assert texts[2] == "error: there is no tool 'subtract'; there is diary_note, add"
    assert rollout.metrics == {"tool_calls": 3, "tool_errors": 3, "calls": 0.0, "lines": 0.0}


async def test_a_malformed_call_returns_an_error_and_the_run_goes_on():
    unread = untrained_reply("hm", [ToolCall("call_0", "", {}, "the tool call is not closed")], raw="hm <tool_call>")
    (rollout,) = await played("Sums", unread, "42")
    assert rollout.messages[-2]["content"] == "error: the tool call is not closed"
    assert (len(rollout.turns), rollout.rewards) == (2, {"right": 1.0})


async def test_a_toolset_that_registers_its_own_tools_is_closed_with_its_run():
    from tests.environments.adapters.verifiers_tasksets import Oracle

    before = Oracle.closed
    (rollout,) = await played("Oracles", call_tool("oracle_answer", question="abc"), "42")
    assert rollout.messages[-2]["content"] == "cba\n42"
    assert Oracle.closed == before + 1


async def test_episodes_that_share_a_toolset_keep_their_own_state():
    from tests.environments.adapters.verifiers_tasksets import Diary

    before = Diary.opened
    async with playing("Sums") as (environment, task):

        async def one(lines: int) -> Rollout:
            notes = [call_tool("diary_note", text=str(n)) for n in range(lines)]
            return (await play(environment, task, in_order(*notes, "42")))[0][0]

        rollouts = await asyncio.gather(*map(one, range(4)))
    assert [rollout.metrics["lines"] for rollout in rollouts] == [0.0, 1.0, 2.0, 3.0]
    assert Diary.opened == before + 1


# Several agents


async def test_each_agent_has_a_rollout_of_its_own():
    proposer, critic, audience = await played("Reverse", "olleh", "yes", "no", **DEBATE)
    assert [rollout.agent for rollout in (proposer, critic, audience)] == ["proposer", "critic", "audience"]
    assert [rollout.trainable for rollout in (proposer, critic, audience)] == [True, True, False]
    assert proposer.rewards["right"] == 1.0
    assert critic.rewards == {"agrees": 2.0}
    assert critic.metrics == {"heard": 5.0}
    assert sum(audience.rewards.values()) == 0.0


async def test_one_of_several_runs_fails_alone():
    attempts = {"id": "best-of-n", "n": 2}
    good, bad = await played("Broken", "hello", "boom", env=attempts)
    assert (good.error, good.rewards, good.metrics) == (None, {"right": 1.0}, {"best": 1.0, "pass_at_n": 1.0})
    assert bad.error is not None
    assert bad.error.reason == "task_error"


# Failures and ends


async def test_a_reward_that_raises_fails_the_episode_and_says_where():
    with pytest.raises(EpisodeError, match="LookupError: no such answer") as caught:
        await played("Broken", "boom")
    assert caught.value.reason == "task_error"
    assert "verifiers_tasksets.py:" in caught.value.place
    assert caught.value.remote_traceback.rstrip().endswith("LookupError: no such answer")


async def test_why_the_model_gave_no_answer_is_what_is_raised():
    async with playing("Reverse") as (environment, task):
        failing = Failing()
        with pytest.raises(type(failing.error)) as caught:
            await environment.run(task, failing)
        assert caught.value is failing.error


async def test_an_episode_lets_itself_be_cancelled():
    async with playing("Sums") as (environment, task):
        silent = Silent()
        episode = asyncio.create_task(environment.run(task, silent))
        await silent.asked.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert silent.hung_up.is_set()


async def test_a_reply_that_was_cut_off_is_truncated_and_scored():
    (rollout,) = await played("Reverse", cut_off("olleh"))
    assert (rollout.truncated, rollout.stop_reason, rollout.rewards["right"]) == (True, "truncated", 1.0)


async def test_an_agent_that_is_out_of_time_is_scored_and_a_scorer_that_is_fails():
    async with playing("Reverse", env={"agent": {"timeout": {"rollout": 0.02}}}) as (environment, task):
        (rollout,) = await environment.run(task, Silent())
    assert (rollout.truncated, rollout.stop_reason, rollout.error) == (True, "agent_timeout", None)
    assert rollout.rewards == {"right": 0.0, "short": 0.5, "said": 0.0}
    slow = {"rewards": {"slow": {"fn": f"{MODULE}:sleepy"}}}
    (unscored,) = await played("Reverse", "olleh", task=slow, env={"agent": {"timeout": {"scoring": 0.02}}})
    assert unscored.error is not None
    assert unscored.error.reason == "scoring_timeout"


async def test_a_run_without_room_ends_unless_it_has_just_begun():
    def small(messages: Sequence[Message]) -> str:
        if len(messages) > room:
            raise PromptTooLong("no room")
        return "a"

    room = 2
    async with playing("Guess", **GUESS) as (environment, task):
        ((rollout,), _) = await play(environment, task, small)
        assert (len(rollout.turns), rollout.truncated, rollout.stop_reason) == (1, True, "context_full")
        room = 1
        with pytest.raises(PromptTooLong):
            await play(environment, task, small)


async def test_hostile_replies_cost_nothing_but_the_reward():
    """Whatever the probe tries, but for what is too large to try here."""
    async with playing("Sums") as (environment, task):
        for completion in COMPLETIONS:
            if completion.from_gold or completion.name == "10 MB":
                continue

            def answer(messages: Sequence[Message], reply: Any = completion.reply) -> Any:
                if len(messages) >= 6:
                    return "done"
                return reply(ChatState(environment, task, messages, [], Random(0))) if callable(reply) else reply

            if completion.name not in ("gold", "mistake"):
                (rollout,), _ = await play(environment, task, answer)
                assert rollout.rewards == {"right": 0.0}, completion.name


# What cannot be


@pytest.mark.parametrize(
    ("name", "args", "cause"),
    [
        ("Containers", {}, "container"),
        ("Images", {}, "python:3.11"),
        ("Reverse", {"env": {"agent": {"harness": {"id": "bash"}}}}, "bash"),
        ("Reverse", {"env": {"agent": {"runtime": {"type": "docker"}}}}, "docker"),
        ("Reverse", {"env": {"agent": {"model": "gpt"}}}, "model"),
        ("Reverse", {"env": {"agent": {"sampling": {"temperature": 0.1}}}}, "temperature"),
        ("Reverse", {"env": {"id": "agentic-judge"}}, "judge harness"),
        ("Sums", {"task": {"tools": {"url": "http://x"}}}, "http://x"),
        ("Sums", {"diary": {"runtime": {"type": "docker"}}}, "Diary"),
        ("Nothing", {}, "Nothing"),
        ("GuessEnv", {}, "Taskset"),
    ],
)
def test_a_taskset_that_needs_more_than_this_process_is_refused_with_the_cause(
    name: str, args: dict[str, Any], cause: str
):
    with pytest.raises(BadInput) as caught:
        tasks_of(environment_of(name, **args), name)
    assert cause in caught.value.fact


@pytest.mark.parametrize(
    ("args", "keys"),
    [
        ({"wordz": 1, "id": "x"}, ["args.wordz", "args.id"]),
        ({"words": "many"}, ["args.words"]),
        ({"env": {"judge": {}}}, ["args.env.judge"]),
        ({"env": {"agent": {"turns": 3}}}, ["args.env.agent.turns"]),
        ({"select": {"first": 3}}, ["args.select.first"]),
    ],
)
def test_unknown_arguments_are_refused_by_name(args: dict[str, Any], keys: list[str]):
    with refused(EnvironmentNotFound) as caught:
        environment_of("Reverse", **args)
    assert [problem.key for problem in caught.value.problems] == keys


def test_a_taskset_that_is_not_there_is_refused_in_one_line():
    for name in ("no_such_taskset", "no.such.taskset"):
        with refused(key="environment") as caught:
            load_environment(f"verifiers:{name}", {})
        assert name in caught.value.value and "No module named 'no" in caught.value.fact


class NotInstalled:
    """An import system in which there is no verifiers."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name == "verifiers":
            raise ModuleNotFoundError("No module named 'verifiers'", name=name)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled, *sys.meta_path])
    with refused(key="environment") as caught:
        environment_of("Reverse")
    assert "headrace[verifiers]" in caught.value.fix


def test_the_library_is_not_imported_before_it_is_needed():
    program = "import headrace.environments.adapters.verifiers as ours, sys; print(ours, 'verifiers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


# Exact to the token

TASKSETS: list[tuple[str, dict[str, Any]]] = [
    ("Reverse", {}),
    ("Sums", {"env": {"agent": {"max_turns": 6}}}),
    ("Guess", GUESS),
    ("Reverse", DEBATE),
    ("Reverse", {"env": {"id": "best-of-n", "n": 2}}),
]


async def play_adversary(environment: Environment, task: Task, family: str, rng: Random) -> None:
    engine = RecordingEngine(Adversary(load(family), rng))
    model = load(family)
    line = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=20_000).open("session", "episode")
    rollouts = await environment.run(task, line)
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    assert len(turns) == len(engine.exchanges)
    check_turns(engine, turns)
    for rollout in rollouts:
        check_samples(rollout.turns, merge_turns(rollout.turns))


@pytest.mark.parametrize(("name", "args"), TASKSETS)
async def test_whatever_a_policy_samples_is_trained_on_as_it_was_sampled(name: str, args: dict[str, Any]):
    rng = Random(3)
    async with playing(name, **args) as (environment, task):
        for family in ("qwen3", "qwen3-all", "llama-3", "glm-4.5", "gpt-oss", "default"):
            await play_adversary(environment, task, family, rng)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "args"), TASKSETS)
async def test_any_family_is_trained_on_what_it_sampled(name: str, args: dict[str, Any], family: str):
    async with playing(name, **args) as (environment, task):
        for seed in range(20):
            await play_adversary(environment, task, family, Random(seed))


@pytest.mark.parametrize("family", KEEPS_HISTORY[:3])
@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("Guess", GUESS, [Said("the cat"), Said("hello and"), Said("k")]),
        ("Sums", {}, [Said("", [("add", {"a": 12})]), Said("hello", [("add", {"a": 3, "b": 4})]), Said("42")]),
    ],
)
async def test_a_conversation_keeps_its_tokens_however_they_are_spelled(
    family: str, name: str, args: dict[str, Any], said: list[Said]
):
    model = load(family)
    if model.family.thinks:
        said = [Said(one.text, one.calls, "hm") for one in said]
    spelled = [model.respelled(model.written(one), Random(0), share=1.0) for one in said]
    engine = RecordingEngine(scripted(*spelled))
    async with playing(name, **args) as (environment, task):
        line = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=10_000).open("session", "episode")
        (rollout,) = await environment.run(task, line)
    (sample,) = merge_turns(rollout.turns)
    assert sample.token_ids[sample.mask].tolist() == [token for one in spelled for token in one]
    assert sum(rollout.rewards.values()) == 1.0


async def test_what_two_branches_of_a_trace_share_is_trained_once():
    from tests.environments.adapters.verifiers_tasksets import ForkEnv

    model = load("qwen3-without-thoughts")
    said = [model.respelled(model.written(Said(text)), Random(0), share=1.0) for text in ("hello the cat", "a", "b")]
    engine = RecordingEngine(scripted(*said))
    async with playing("Guess", env={"id": f"{MODULE}:ForkEnv"}) as (environment, task):
        line = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=10_000).open("session", "episode")
        (rollout,) = await environment.run(task, line)
    assert ForkEnv.branches == 2
    samples = merge_turns(rollout.turns)
    check_samples(rollout.turns, samples)
    assert [sample.token_ids[sample.mask].tolist() for sample in samples] == [said[0] + said[1], said[2]]
    begun = engine.exchanges[0].prompt + said[0]
    assert samples[1].token_ids[: len(begun)].tolist() == begun


async def test_what_two_agents_go_on_from_is_trained_once():
    model = load("qwen3-without-thoughts")
    first = model.respelled(model.written(Said("hello the cat")), Random(0), share=1.0)
    others = [model.written(Said(text)) for text in ("yes", "no")]
    engine = RecordingEngine(scripted(first, *others))
    async with playing("Reverse", **DEBATE) as (environment, task):
        line = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=10_000).open("session", "episode")
        rollouts = await environment.run(task, line)
    samples = [merge_turns(rollout.turns) for rollout in rollouts]
    assert [len(of_one) for of_one in samples] == [1, 1, 1]
    begun = engine.exchanges[0].prompt + first
    for (sample,), own in zip(samples[1:], others, strict=True):
        assert sample.token_ids[: len(begun)].tolist() == begun
        assert sample.token_ids[sample.mask].tolist() == own


@pytest.mark.full
async def test_a_worker_process_runs_a_taskset():
    async with pool(identifier=f"verifiers:{MODULE}:Reverse") as workers:
        (rollout,) = await workers.run(tasks_of(workers, "words")[0], Echo())
    assert rollout.messages[-1]["content"] == "echo Reverse hello"
    assert rollout.metrics == {"letters": 18.0}


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_model_is_trained_on_a_taskset_to_the_end_of_its_run(tmp_path: Path, tiny_model: Path):
    file = write_run_file(tmp_path, tiny_model)
    taskset = f'id = "verifiers:{MODULE}:Printable"\nargs = {{ env = {{ id = "{MODULE}:AgainEnv" }} }}'
    native = 'id = "tests.end_to_end.environments:Letters"'
    file.write_text(file.read_text().replace(native, taskset).replace("seq_len = 48", "seq_len = 128"))
    code, output = headrace("rl", file)
    assert code == 0, output
    records = list(read_metrics(RunDir(tmp_path / "run").metrics))
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3]
    assert all(record["reward/all/mean"] > 0 for record in records if "reward/all/mean" in record)
    assert headrace("audit", tmp_path / "run")[0] == 0


# The documentation

DOCS = (Path(__file__).parents[3] / "docs" / "how-to/verifiers.md").read_text()


def block(language: str) -> str:
    return DOCS.partition(f"```{language}\n")[2].partition("```")[0]


async def test_the_documented_taskset_runs_with_the_documented_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import tomllib

    (tmp_path / "capitals.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    entry = tomllib.loads(block("toml"))["orchestrator"]["train"]["env"][0]
    environment = load_environment(entry["id"], entry["args"])
    await environment.start()
    for task in tasks_of(environment, "capitals"):
        (rollout,), _ = await play(environment, task, lambda messages, task=task: environment.gold(task, messages))
        assert rollout.rewards == {"right": 1.0, "brief": 0.2}
        assert ", please?" in rollout.messages[0]["content"]
    await environment.close()
