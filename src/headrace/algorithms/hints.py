"""Hints: texts in a template that a teacher reads in the conversation of the sample that it scores.

    system messages, hint, the other messages of the sample's first prompt    rendered once, as the policy would see it
    completions and observations of the sample                                its own tokens

The hint is a message by the user; where the chat format requires that roles alternate, it is put at the beginning of
the user's first message. So the chat template writes its BOS, its default system prompt and the system message once,
each in its place.

A rollout has messages and no tools. Rendering without tools shows what the hint changes, from its first token to the
end of the prompt; these tokens replace those of the prompt. Where the rollout's messages do not render to the end of
the prompt, the conversation from the user's last message on is tried. If that fails too, the hint is put before the
prompt as a separate conversation, and is counted.

A hint may be the response of a sibling. Which one depends on the contents of the batch, not on the order of arrival.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.rollout.types import Message, Rollout, Sample

if TYPE_CHECKING:
    from headrace.algorithms.base import Host

MAX_INLINE_CHARS = 20_000
"""Texts up to this length are rendered on the event loop; longer ones in a thread."""


class Hints:
    """Renders prompts with hints for one batch, and caches them by prompt and text."""

    def __init__(self, host: Host, template: str, placeholder: str) -> None:
        from headrace.text.prompt import PromptRenderer  # slow to import, and commands import all algorithms

        self._renderer, self._prompts = host.renderer, PromptRenderer(host.renderer)
        self._bos = host.tokenizer.bos_token_id
        self._template = template
        self._placeholder = placeholder
        self._cache: dict[tuple[str, bytes], list[int]] = {}
        self.separate = 0
        """Prompts whose hint is a separate conversation before them."""

    async def prompt(self, rollout: Rollout, sample: Sample, text: str) -> list[int]:
        """Return the tokens of the sample's first prompt with this text as a hint; unchanged if the hint is empty."""
        content = self._template.replace(self._placeholder, text)  # not str.format: the text may contain braces
        own = sample.token_ids[: sample.prompt_length]
        if not content:
            return list(own.tolist())
        if (key := (content, own.tobytes())) not in self._cache:
            if len(content) + sum(map(len, map(message_text, rollout.messages))) > MAX_INLINE_CHARS:
                self._cache[key] = await asyncio.to_thread(self._render_hinted, rollout, own, content)
            else:
                await asyncio.sleep(0)  # yield to the event loop between many short texts
                self._cache[key] = self._render_hinted(rollout, own, content)
        return self._cache[key]

    def _render_hinted(self, rollout: Rollout, own: np.ndarray, content: str) -> list[int]:
        """Return the tokens of the prompt `own` with the hint in its conversation, or else before it."""
        ids: list[int] = own.tolist()
        for messages in _conversations(rollout, own):
            roles = [message.get("role") for message in messages]
            first = next((n for n, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
            hint: list[Message] = [{"role": "user", "content": content}]
            rest = messages[first:]
            if rest and roles[first] == "user" and not self._accepts_two_user_messages:
                hint, rest = [{**rest[0], "content": _prepend(content, rest[0].get("content"))}], rest[1:]
            plain, hinted = self._render(messages), self._render([*messages[:first], *hint, *rest])
            if plain is not None and hinted is not None:
                common = next((n for n, pair in enumerate(zip(plain, hinted, strict=False)) if pair[0] != pair[1]), 0)
                start = len(ids) - (len(plain) - common)
                if start >= 0 and ids[start:] == plain[common:]:
                    return ids[:start] + hinted[common:]
        self.separate += 1
        message: list[Any] = [{"role": "user", "content": content}]
        alone: list[int] = list(self._renderer.render_ids(message, add_generation_prompt=False))
        return alone + (ids[1:] if ids[:1] == alone[:1] == [self._bos] else ids)

    @cached_property
    def _accepts_two_user_messages(self) -> bool:
        """Whether the chat format accepts two messages by the user in a row."""
        return self._render([{"role": "user", "content": "0"}] * 2) is not None

    def _render(self, messages: Sequence[Message]) -> list[int] | None:
        try:
            return self._prompts.render(messages, ()).ids
        except Exception:  # templates raise any type for messages they cannot render
            return None


def _prepend(text: str, content: Any) -> Any:
    """Return the content of a message with a text put before its first text."""
    if not isinstance(content, list):
        return f"{text}\n\n{content}" if content else text
    first = next((n for n, part in enumerate(content) if isinstance(part, dict) and part.get("type") == "text"), None)
    if first is None:
        return [{"type": "text", "text": text}, *content]
    # In the same part: some templates trim each part.
    part = {**content[first], "text": f"{text}\n\n{content[first].get('text') or ''}"}
    return [*content[:first], part, *content[first + 1 :]]


def _conversations(rollout: Rollout, prompt: np.ndarray) -> Iterator[list[Message]]:
    """Yield message lists that a prompt may be rendered from, each followed by its end from the user's last message on.

    First all messages before the prompt's reply, then those before any reply: environments may leave out replies, and
    keep the messages of several conversations in a row, or only those of the last.
    """
    turns = [np.array_equal(turn.prompt_ids, prompt) for turn in rollout.turns]
    if True not in turns:
        return
    replies = [index for index, message in enumerate(rollout.messages) if message.get("role") == "assistant"]
    own = replies[-len(turns) :]
    place = turns.index(True) - len(turns) + len(own)
    ends = [*([own[place]] if place >= 0 else ()), *replies[:1], len(rollout.messages)]
    for before in [rollout.messages[:end] for end in dict.fromkeys(ends[:2]) if end]:
        yield before
        users = [index for index, message in enumerate(before) if message.get("role") == "user"]
        if users and users[-1]:
            yield before[users[-1] :]


def conversation_text(messages: Sequence[Message]) -> str:
    """Return several messages as one text; messages of other roles begin with their role."""
    parts = ((message.get("role"), message_text(message)) for message in messages)
    return "\n\n".join(text if role == "assistant" else f"{role}: {text}" for role, text in parts if text)


def message_text(message: Message) -> str:
    """Return thoughts, text and tool calls of a message, one per line."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    parts = [_content_text(thoughts), _content_text(message.get("content"))]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        arguments = function.get("arguments") or {}
        encoded = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        parts.append(f"{function.get('name', '')}({encoded})")
    return "\n".join(part for part in parts if part)


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def draw_siblings(
    rollouts: Sequence[Rollout],
    correct_from: float,
    incorrect_below: float,
    negatives: int,
    seed: int,
    may_hint: Callable[[Rollout], Any] | None = None,
) -> list[list[Rollout]]:
    """Return for each rollout a correct sibling and then incorrect ones; empty where either is missing.

    `correct_from` and `incorrect_below` are rewards; at most `negatives` are incorrect; `may_hint` narrows the choice.
    """
    digests = []  # of the token ids, the same on every machine
    for rollout in rollouts:
        digest = hashlib.blake2b(digest_size=16)
        for sample in rollout.samples:
            digest.update(len(sample).to_bytes(8, "little") + sample.token_ids.astype("<i4").tobytes())
        digests.append(digest.hexdigest())
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index in sorted(range(len(rollouts)), key=digests.__getitem__):
        rollout = rollouts[index]
        if may_hint is None or may_hint(rollout):
            groups[rollout.group_id, rollout.agent].append(index)
    drawn: list[list[Rollout]] = []
    for index, rollout in enumerate(rollouts):
        siblings = [rollouts[other] for other in groups[rollout.group_id, rollout.agent] if other != index]
        correct = [sibling for sibling in siblings if sibling.reward >= correct_from]
        incorrect = [sibling for sibling in siblings if sibling.reward < incorrect_below]
        rng, count = Random(f"{seed} {rollout.draw_id} {digests[index]}"), min(negatives, len(incorrect))
        drawn.append([rng.choice(correct), *rng.sample(incorrect, count)] if correct and incorrect else [])
    return drawn


def response_text(rollout: Rollout) -> str:
    """Return thoughts, text and tool calls of all turns."""
    return "\n\n".join(text for text in map(message_text, replies(rollout)) if text)


def replies(rollout: Rollout) -> list[Message]:
    """Return the last assistant messages, one per turn; earlier ones are examples in the prompt."""
    own = [message for message in rollout.messages if message.get("role") == "assistant"]
    return own[-len(rollout.turns) :]
