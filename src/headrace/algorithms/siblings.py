"""Which siblings of a rollout are shown to its teacher, and what of them.

What is drawn depends on who is in the batch, and not on the order in which they came.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from headrace.algorithms.hints import message_text
from headrace.rollout.types import Message, Rollout


class Siblings:
    """The pools depend on the reward alone; `may_hint` can narrow them."""

    def __init__(
        self,
        correct_threshold: float,
        min_contrast_gap: float,
        negatives: int,
        may_hint: Callable[[Rollout], Any] | None = None,
    ) -> None:
        self._correct = correct_threshold
        self._incorrect = correct_threshold - min_contrast_gap
        self._negatives = negatives
        self._may_hint = may_hint

    def draw(self, rollouts: Sequence[Rollout], seed: int) -> list[list[Rollout]]:
        """For each rollout a correct sibling, then incorrect ones; none where it lacks either."""
        digests = [_digest(rollout) for rollout in rollouts]
        groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for index in sorted(range(len(rollouts)), key=digests.__getitem__):
            rollout = rollouts[index]
            if self._may_hint is None or self._may_hint(rollout):
                groups[rollout.group_id, rollout.agent].append(index)
        drawn = []
        for index, rollout in enumerate(rollouts):
            others = [rollouts[other] for other in groups[rollout.group_id, rollout.agent] if other != index]
            drawn.append(self._hints(others, Random(f"{seed} {rollout.draw_id} {digests[index]}")))
        return drawn

    def _hints(self, siblings: Sequence[Rollout], rng: Random) -> list[Rollout]:
        correct = [sibling for sibling in siblings if sibling.reward >= self._correct]
        incorrect = [sibling for sibling in siblings if sibling.reward < self._incorrect]
        if not correct or not incorrect:
            return []
        return [rng.choice(correct), *rng.sample(incorrect, min(self._negatives, len(incorrect)))]


def response_text(rollout: Rollout) -> str:
    """All that the model said: thoughts, text and tool calls of every turn."""
    return "\n\n".join(text for text in map(message_text, replies(rollout)) if text)


def replies(rollout: Rollout) -> list[Message]:
    """The model's messages, as many as it had turns: those before them are examples in its prompt."""
    own = [message for message in rollout.messages if message.get("role") == "assistant"]
    return own[-len(rollout.turns) :]


def _digest(rollout: Rollout) -> str:
    """A name for its tokens, the same on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in rollout.samples:
        digest.update(len(sample).to_bytes(8, "little"))
        digest.update(sample.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()
