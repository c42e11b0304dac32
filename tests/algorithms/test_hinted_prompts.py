"""Hints are in the conversation of a sample, rendered once, for chat templates with the structure of real ones."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from jinja2 import TemplateError
from renderers.base import Renderer

from headrace.algorithms.base import Host
from headrace.algorithms.hints import Hints
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import load_model
from headrace.inference.schema import SamplingParams
from headrace.orchestrator.crediting import PolicyReference
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Message, Rollout, Task, Turn
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer, byte_tokenizer
from tests.algorithms.teachers import MODEL, Teacher, hint_ids, opsd_of, pretended_logprobs, rlcsd_of, survivors
from tests.inference.serving import client_of_engine

BOS = "<|endoftext|>"
ALTERNATES = "{{ raise_exception('roles must alternate') }}"
TEMPLATES = {
    # a default system prompt, and tools in the system message
    "qwen": """\
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are Qwen.' -%}
<|im_start|>system
{{ system }}{% if tools %}

# Tools
{{ tools | tojson }}{% endif %}<|im_end|>
{% for m in messages if m.role != 'system' -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    # BOS, a system message that is always there, and tools in the first message of the user
    "llama": """\
{{- bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif -%}
<|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: December 2023

{{ system }}<|eot_id|>
{%- if tools %}{% set first = messages[0].content | trim %}{% set messages = messages[1:] -%}
<|start_header_id|>user<|end_header_id|>

Given the following functions: {{ tools | tojson }}

{{ first }}<|eot_id|>{% endif %}
{%- for m in messages -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    # BOS, alternating roles, and the system message at the beginning of the user's first
    "gemma": """\
{{- bos_token }}{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}{% else %}{% set before = '' %}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}ALTERNATES{% endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ before if loop.first }}{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}<image>{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}""",
    # BOS, alternating roles, and system message and tools in the user's last
    "mistral": """\
{{- bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}ALTERNATES{% endif %}
{%- if m.role == 'user' %}{% if tools and loop.last -%}
[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {% if loop.last and system is defined %}{{ system }}

{% endif %}{{ m.content }}[/INST]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}""",
}
ALTERNATE = ("gemma", "mistral")
ONCE = {"qwen": ["You are Qwen."], "llama": [BOS, "Cutting Knowledge"], "gemma": [BOS], "mistral": [BOS]}
"""What each template writes once, unless there is a system message instead."""
SYSTEM: Message = {"role": "system", "content": "Be brief."}
QUESTION: Message = {"role": "user", "content": "How old is the mill?"}
FEW_SHOT: list[Message] = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CONVERSATIONS: dict[str, list[Message]] = {
    "question": [QUESTION],
    "system": [SYSTEM, QUESTION],
    "few-shot": [*FEW_SHOT, QUESTION],
    "system, few-shot": [SYSTEM, *FEW_SHOT, QUESTION],
}
HINT = "A hint: {it}."


class Format(NamedTuple):
    tokenizer: Tokenizer
    renderer: Renderer


@functools.cache
def format_of(name: str) -> Format:
    with TemporaryDirectory() as folder:
        byte_tokenizer().save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": "<|im_end|>"}))
        (Path(folder) / "chat_template.jinja").write_text(TEMPLATES[name].replace("ALTERNATES", ALTERNATES))
        tokenizer = Tokenizer(folder)
        return Format(tokenizer, make_renderer(folder, tokenizer, "default"))


def host_of(name: str, policy: Any = None) -> Host:
    tokenizer, renderer = format_of(name)
    return Host("env", policy or Teacher(), renderer, tokenizer, 1000)


def prompt_of(name: str, messages: list[Message], tools: Any = None) -> list[int]:
    return format_of(name).tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)


def rollout_of(prompt: list[int], messages: list[Message], reply: list[int], reward: float = 0.0) -> Rollout:
    """Two turns in one sample, with an observation between them that no rendering would reproduce."""
    first = Turn(prompt, reply, [-1.0] * len(reply), [0] * len(reply), 1.0)
    second = Turn([*prompt, *reply, 250, 251], reply, [-1.0] * len(reply), [0] * len(reply), 1.0)
    said = [{"role": "assistant", "content": "Old."}, {"role": "user", "content": "?"}]
    turns = [first, second]
    messages = [*messages, *said, {"role": "assistant", "content": "Very old."}]
    return Rollout(group_id="g", reward=reward, messages=messages, turns=turns, samples=merge_turns(turns))


def with_hint(name: str, messages: list[Message], text: str) -> list[Message]:
    """The hinted conversation, written out: a message after the system's, or in the user's first if roles alternate."""
    system, others = ([SYSTEM], messages[1:]) if messages[0] is SYSTEM else ([], messages)
    if name in ALTERNATE:
        return [*system, {"role": "user", "content": f"{text}\n\n{others[0]['content']}"}, *others[1:]]
    return [*system, {"role": "user", "content": text}, *others]


async def hinted(name: str, rollout: Rollout, text: str = "it is old", template: str = HINT) -> tuple[list[int], int]:
    hints = Hints(host_of(name), template, "{it}")
    return await hints.prompt(rollout, rollout.samples[0], text), hints.separate


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
async def test_the_hinted_prompt_is_the_hinted_conversation_as_the_policy_would_see_it(name: str, conversation: str):
    messages = CONVERSATIONS[conversation]
    own = prompt_of(name, messages)
    tokens, apart = await hinted(name, rollout_of(own, messages, [7, 8]))
    expected = with_hint(name, messages, "A hint: it is old.")
    assert (tokens, apart) == (prompt_of(name, expected), 0)
    text, plain = format_of(name).tokenizer.decode(tokens), format_of(name).tokenizer.decode(own)
    for words in [*ONCE[name], "Be brief.", "mill?"]:
        assert text.count(words) == plain.count(words) <= 1
    if SYSTEM in messages and name != "mistral":  # which writes it in the user's last message
        assert text.index("Be brief.") < text.index("A hint:")


async def test_in_plain_chatml_the_hint_is_a_message_before_the_prompt():
    own = MODEL.renderer.render_ids([QUESTION], add_generation_prompt=True)
    rollout = rollout_of(own, [QUESTION], [7, 8])
    hints = Hints(Host("env", Teacher(), MODEL.renderer, MODEL.tokenizer, 1000), HINT, "{it}")
    assert await hints.prompt(rollout, rollout.samples[0], "it is old") == [*hint_ids("A hint: it is old."), *own]
    assert hints.separate == 0


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
async def test_an_empty_hint_leaves_the_prompt_as_it_is(name: str, conversation: str):
    own = prompt_of(name, CONVERSATIONS[conversation], TOOLS)
    rollout = rollout_of(own, CONVERSATIONS[conversation], [7, 8])
    assert await hinted(name, rollout, "", template="{it}") == (own, 0)


@pytest.mark.parametrize("conversation", ["question", "system"])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "gemma"])
async def test_tools_of_the_prompt_stay_although_a_rollout_does_not_keep_them(name: str, conversation: str):
    messages = CONVERSATIONS[conversation]
    own = prompt_of(name, messages, TOOLS)
    assert own != prompt_of(name, messages)
    tokens, apart = await hinted(name, rollout_of(own, messages, [7, 8]))
    assert (tokens, apart) == (prompt_of(name, with_hint(name, messages, "A hint: it is old."), TOOLS), 0)


def test_templates_that_require_alternating_roles_refuse_two_in_a_row():
    for name in TEMPLATES:
        try:
            prompt_of(name, [QUESTION, QUESTION])
        except TemplateError:
            assert name in ALTERNATE
        else:
            assert name not in ALTERNATE


async def test_a_later_conversation_of_a_rollout_gets_its_hint_before_its_own_question():
    own = prompt_of("llama", [SYSTEM, QUESTION])
    rollout = rollout_of(own, [*FEW_SHOT, QUESTION], [7, 8])  # the messages begin with another conversation
    assert await hinted("llama", rollout) == (
        prompt_of("llama", [SYSTEM, {"role": "user", "content": "A hint: it is old."}, QUESTION]),
        0,
    )


@pytest.mark.parametrize("kept", [1, 2, 3])
async def test_an_environment_may_leave_out_replies_in_its_messages(kept: int):
    own = prompt_of("llama", [QUESTION])
    rollout = rollout_of(own, [QUESTION], [7, 8])
    del rollout.messages[kept:]  # of the question, a reply, a second question and its reply
    hint = {"role": "user", "content": "A hint: it is old."}
    assert await hinted("llama", rollout) == (prompt_of("llama", [hint, QUESTION]), 0)


async def test_a_hint_stands_before_a_prompt_of_unknown_messages_with_one_bos():
    own = prompt_of("llama", [QUESTION])
    rollout = rollout_of(own, [], [7, 8])
    tokens, apart = await hinted("llama", rollout)
    apply = format_of("llama").tokenizer.apply_chat_template
    alone = apply([{"role": "user", "content": "A hint: it is old."}], add_generation_prompt=False)
    assert (tokens, apart) == ([*alone, *own[1:]], 1)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([{"type": "text", "text": "How old?"}], "A hint: it is old.\n\nHow old?"),
        ([{"type": "image"}, {"type": "text", "text": "How old?"}], "<image>A hint: it is old.\n\nHow old?"),
        ([{"type": "image"}], "A hint: it is old.<image>"),
    ],
)
async def test_a_hint_is_in_the_first_text_of_a_message_in_parts(parts: list[Any], expected: str):
    messages: list[Message] = [{"role": "user", "content": parts}]
    tokens, apart = await hinted("gemma", rollout_of(prompt_of("gemma", messages), messages, [7, 8]))
    assert (tokens, apart) == (prompt_of("gemma", [{"role": "user", "content": expected}]), 0)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("make", [opsd_of, rlcsd_of])
async def test_each_token_of_a_sample_of_several_turns_is_scored_in_its_place(name: str, make: Any):
    own = prompt_of(name, [SYSTEM, QUESTION])
    batch = survivors(
        [rollout_of(own, [SYSTEM, QUESTION], [n, 9, 8], reward=1.0 - n % 2) for n in range(4)],
        Task("env", {"demonstration": "It is old."}),
    )
    policy = Teacher()
    algorithm = make()
    await algorithm.start(host_of(name, policy))
    await algorithm.score_group(batch)
    await algorithm.score_batch(batch)
    endings = [survivor.samples[0].token_ids[len(own) :].tolist() for survivor in batch]
    assert {tuple(asked[-len(endings[0]) :]) for asked, _ in policy.asked} == set(map(tuple, endings))
    assert "hints_apart" not in algorithm.tally.take()
    if make is opsd_of:
        for survivor in batch:
            [sample] = survivor.samples
            [asked] = [
                ids for ids, _ in policy.asked if ids[-len(endings[0]) :] == sample.token_ids[len(own) :].tolist()
            ]
            expected = pretended_logprobs(asked)[-len(endings[0]) :].astype(np.float32)
            assert sample.streams["ref_logprobs"][len(own) :].tolist() == expected.tolist()


async def test_the_engine_scores_a_sample_as_it_sampled_it_and_a_hinted_one_as_the_hinted_conversation(
    tiny_model: Path,
):
    engine = Engine(load_model(tiny_model, "float32"), max_model_len=512)
    async with client_of_engine(engine, tiny_model) as client:
        for name in TEMPLATES:
            await check_scores(name, client)


async def check_scores(name: str, client: EngineClient) -> None:
    messages = CONVERSATIONS["system"]
    prompt = prompt_of(name, messages)
    done = await client.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True, seed=0))
    turn = Turn(prompt, done.token_ids, done.logprobs, done.steps, 1.0)
    said = [*messages, {"role": "assistant", "content": "?"}]
    rollout = Rollout(messages=said, turns=[turn], samples=merge_turns([turn]))
    [sample] = rollout.samples
    for text in ("", "old"):
        algorithm = opsd_of(template="{demonstration}")
        await algorithm.start(host_of(name, PolicyReference(client)))
        await algorithm.score_batch(survivors([rollout], Task("env", {"demonstration": text})))
        conversation = with_hint(name, messages, text) if text else messages
        expected = await client.score([*prompt_of(name, conversation), *done.token_ids])
        scores = sample.streams["ref_logprobs"][sample.mask]
        assert scores == pytest.approx(expected.logprobs[-12:], abs=1e-5)
        assert (np.abs(scores - sample.logprobs[sample.mask]).max() < 1e-5) == (not text)
