"""Which renderer `auto` takes."""

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidValue
from headrace.text.renderer import make_renderer, shows_tools
from headrace.text.tokenizer import Tokenizer
from tests.text.conftest import CHATML, WriteModel

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
ANSWERED: list[dict[str, Any]] = [*QUESTION, {"role": "assistant", "content": "yes"}]

# Qwen3's own on plain conversations: an answer after the last question carries its (here empty) thoughts
QWEN3 = """\
{%- set last = namespace(user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set last.user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > last.user and loop.last %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def renderer_of(directory: Any, **options: Any) -> Any:
    return make_renderer(directory, Tokenizer(directory), **options)


def test_auto_takes_the_family_that_reproduces_the_template(write_model: WriteModel):
    directory = write_model(QWEN3)
    assert type(renderer_of(directory)).__name__ == "Qwen3Renderer"


def test_auto_takes_the_template_where_the_family_differs(write_model: WriteModel):
    directory = write_model("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}")
    renderer, tokenizer = renderer_of(directory), Tokenizer(directory)
    assert type(renderer).__name__ == "DefaultRenderer"
    assert tokenizer.decode(renderer.render_ids(QUESTION)) == "user: hello\n"


def test_auto_is_faithful_to_answered_conversations_too(write_model: WriteModel):
    # plain ChatML asks as Qwen3 does but answers without thoughts: training on Qwen3's would be wrong
    directory = write_model(CHATML)
    tokenizer = Tokenizer(directory)
    assert renderer_of(directory).render_ids(ANSWERED) == tokenizer.apply_chat_template(ANSWERED)


def test_auto_takes_the_template_of_an_architecture_without_a_family(write_model: WriteModel):
    assert type(renderer_of(write_model(QWEN3, model_type="mamba"))).__name__ == "DefaultRenderer"


def test_auto_takes_the_template_where_the_familys_tokens_are_missing(write_model: WriteModel):
    # llama-3's special tokens are not in this tokenizer
    assert type(renderer_of(write_model(CHATML, model_type="llama"))).__name__ == "DefaultRenderer"


def test_auto_takes_a_template_that_refuses_the_probe(write_model: WriteModel):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    assert type(renderer_of(write_model(refusing))).__name__ == "DefaultRenderer"


def test_a_named_family_is_taken_as_named(write_model: WriteModel):
    directory = write_model(CHATML, model_type="mamba")
    renderer = renderer_of(directory, name="qwen3", enable_thinking=False, thinking_retention="all")
    text = Tokenizer(directory).decode(renderer.render_ids(QUESTION, add_generation_prompt=True))
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_with_all_thinking_kept_the_next_prompt_repeats_the_last_turn_token_for_token(write_model: WriteModel):
    directory = write_model(QWEN3)
    renderer, tokenizer = renderer_of(directory, name="qwen3", thinking_retention="all"), Tokenizer(directory)
    prompt = renderer.render_ids(QUESTION, add_generation_prompt=True)
    completion = tokenizer.encode("<think>\nhm\n</think>\n\nyes<|im_end|>")
    bridged = renderer.bridge_to_next_turn(prompt, completion, [{"role": "user", "content": "and?"}])
    tail = "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert bridged.token_ids == prompt + completion + tokenizer.encode(tail)


def test_the_template_gets_the_thinking_option(write_model: WriteModel):
    directory = write_model(QWEN3, model_type="mamba")
    renderer = renderer_of(directory, enable_thinking=False)
    text = Tokenizer(directory).decode(renderer.render_ids(QUESTION, add_generation_prompt=True))
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_an_unknown_renderer_is_named(write_model: WriteModel):
    with pytest.raises(InvalidValue) as refusal:
        renderer_of(write_model(), name="qwen33")
    assert (refusal.value.key, refusal.value.value) == ("name", "qwen33")


def test_an_option_that_a_family_lacks_is_named(write_model: WriteModel):
    with pytest.raises(InvalidValue) as refusal:
        renderer_of(write_model(), name="llama-3", enable_thinking=False)
    assert refusal.value.key == "enable_thinking"


def test_auto_warns_when_a_family_renders_tools_differently_from_the_template(
    write_model: WriteModel, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    renderer_of(tiny_model)
    assert "shows tools otherwise" not in caplog.text
    renderer_of(write_model(QWEN3 + "{# tools #}"))
    assert "renderer qwen3 renders tools" in caplog.text


SHOW_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (CHATML, False),
        (CHATML + "{# tools #}{% if tools %}{% endif %}", False),
        (CHATML + SHOW_TOOLS, True),
        (CHATML + "{% if messages[0].role == 'system' %}" + SHOW_TOOLS + "{% endif %}", True),
        (CHATML + "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", False),
        (
            CHATML + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}",
            True,
        ),  # fails with tools
    ],
)
def test_whether_a_template_shows_tools_is_seen_in_what_it_renders(write_model: WriteModel, template: str, shown: bool):
    assert shows_tools(renderer_of(write_model(template, model_type="mamba"))) is shown


def test_a_family_shows_tools_whatever_the_template_does(write_model: WriteModel):
    assert shows_tools(renderer_of(write_model(CHATML), name="qwen3"))
