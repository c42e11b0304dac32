"""Choose the siblings of a rollout that are shown to its teacher, and their text.

The choice depends on the contents of the batch, not on the order of arrival.
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
    """Draws correct and incorrect siblings by reward; `may_hint` can narrow the choice."""

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
        """Return for each rollout a correct sibling and then incorrect ones; empty where either is missing."""
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
