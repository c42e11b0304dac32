"""Hints: texts in a template, rendered as one user message that stands before a scored sample.

A hint may be the response of a sibling. Which one depends on the contents of the batch, not on the order of arrival.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.rollout.types import Message, Rollout

if TYPE_CHECKING:
    from renderers.base import Renderer

MAX_INLINE_CHARS = 20_000
"""Texts up to this length are rendered on the event loop; longer ones in a thread."""


class Hints:
    """Renders the hints of one batch, each text once."""

    def __init__(self, renderer: Renderer, template: str, placeholder: str) -> None:
        self._renderer = renderer
        self._template = template
        self._placeholder = placeholder
        self._rendered: dict[str, list[int]] = {}

    async def of(self, text: str) -> list[int]:
        """Return the tokens of the template with this text in it; empty where that is empty."""
        if text not in self._rendered:
            # Not str.format: the text may contain braces.
            self._rendered[text] = await self._render(self._template.replace(self._placeholder, text))
        return self._rendered[text]

    async def _render(self, content: str) -> list[int]:
        if not content:
            return []
        message: list[Any] = [{"role": "user", "content": content}]
        if len(content) > MAX_INLINE_CHARS:
            return list(await asyncio.to_thread(self._renderer.render_ids, message, add_generation_prompt=False))
        await asyncio.sleep(0)  # yield to the event loop between many short texts
        return list(self._renderer.render_ids(message, add_generation_prompt=False))


def conversation_text(messages: Sequence[Message]) -> str:
    """Return several messages as one text; messages of other roles begin with their role."""
    parts = ((message.get("role"), message_text(message)) for message in messages)
    return "\n\n".join(text if role == "assistant" else f"{role}: {text}" for role, text in parts if text)


def message_text(message: Message) -> str:
    """Return thoughts, text and tool calls of a message, one per line."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    calls = [_call_text(call) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (_content_text(thoughts), _content_text(message.get("content")), *calls) if part)


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _call_text(call: dict[str, Any]) -> str:
    function = call.get("function") or call
    arguments = function.get("arguments") or {}
    given = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return f"{function.get('name', '')}({given})"


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
    digests = [_digest(rollout) for rollout in rollouts]
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


def _digest(rollout: Rollout) -> str:
    """Return a digest of the token ids, the same on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in rollout.samples:
        digest.update(len(sample).to_bytes(8, "little"))
        digest.update(sample.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()
