"""Chat templates in the styles of several model families, written for the tests, each with its tokens.

Tokens are not marked special where a model of that style does not mark them, either: a tokenizer that skips special
tokens alone would still encode them.
"""

from typing import NamedTuple


class ChatTemplate(NamedTuple):
    template: str
    tokens: tuple[str, ...]
    special: tuple[str, ...]


_BODY = "{% for m in messages %}BODY{% endfor %}{% if add_generation_prompt %}OPEN{% endif %}"


def _template(body: str, opening: str) -> str:
    return _BODY.replace("BODY", body).replace("OPEN", opening)


def _bars(*names: str) -> tuple[str, ...]:
    return tuple(f"<|{name}|>" for name in names)


_LLAMA = _bars("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
_DEEPSEEK = tuple(f"<\uff5c{name}\uff5c>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"))
_HARMONY = _bars("start", "end", "message", "channel", "return", "call")
TEMPLATES = {
    "chatml": ChatTemplate(
        _template("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n"),
        _bars("im_start", "im_end", "endoftext"),
        _bars("im_start", "im_end", "endoftext"),
    ),
    "llama": ChatTemplate(
        _template(
            "{% if loop.first %}{{ bos_token }}{% endif %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
            "{{ m.content | trim }}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        _LLAMA,
        _LLAMA,
    ),
    "mistral": ChatTemplate(
        _template(
            "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
            "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
            "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content | tojson }} [/TOOL_RESULTS]{% else %}"
            "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% endif %}",
            "",
        ),
        ("</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ("</s>",),
    ),
    "gemma": ChatTemplate(
        _template(
            "{% set role = 'model' if m.role == 'assistant' else m.role %}"
            "<start_of_turn>{{ role }}\n{{ m.content | trim }}<end_of_turn>\n",
            "<start_of_turn>model\n",
        ),
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<bos>", "<eos>"),
    ),
    "deepseek": ChatTemplate(
        _template(
            "{% if m.role == 'assistant' %}<BARAssistantBAR>{{ m.content.split('</think>')[-1] }}"
            "<BARend▁of▁sentenceBAR>"
            "{% else %}<BARUserBAR>{{ m.content }}{% endif %}",
            "<BARAssistantBAR><think>\n",
        ).replace("BAR", "\uff5c"),
        (*_DEEPSEEK, "<think>", "</think>"),
        _DEEPSEEK[:2],
    ),
    "harmony": ChatTemplate(
        _template(
            "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
            "<|end|>",
            "<|start|>assistant",
        ),
        _HARMONY,
        _HARMONY,
    ),
    # The end of a token is the beginning of another: text could take the first character of the token after it.
    "minimax": ChatTemplate(
        _template("{% if loop.first %}]~!b[{% endif %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n", "]~b]ai\n"),
        ("]~!b[", "]~b]", "[e~["),
        (),
    ),
}
