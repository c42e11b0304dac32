"""Policy versions and the rules for staleness and shipping.

Version v is the weights after v optimizer steps; 0 is the initial model. Batch n trains on version n-1 and produces
version n. The incarnation grows each time a trainer restarts from an older checkpoint, so that a retrained v is never
confused with the lost one.
"""

from __future__ import annotations

import msgspec


class Version(msgspec.Struct, frozen=True, order=True):
    """A published set of weights. Ordered by incarnation first: a rewound trainer publishes newer versions."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Parse `INCARNATION-STEP`, the form in directory names and engine responses."""
        incarnation, separator, step = text.partition("-")
        if not (separator and incarnation.isdecimal() and step.isdecimal()):
            raise ValueError(f"{text!r} is not a policy version; expected INCARNATION-STEP, such as 0-12")
        return cls(int(incarnation), int(step))


def staleness(batch_step: int, oldest_version: int) -> int:
    """Return the optimizer steps from the oldest weights that sampled a rollout to those that the batch trains."""
    return (batch_step - 1) - oldest_version


def may_ship(batch_step: int, policy_version: int, max_async_level: int) -> bool:
    """Return whether batch `batch_step` may ship while the engine still samples from `policy_version`."""
    return policy_version >= batch_step - 1 - max_async_level


def past_step(batch_step: int, every: int, max_async_level: int) -> int:
    """Return the step of the past policy for batch `batch_step`: the largest multiple of `every` that is published
    whenever the batch may ship."""
    return max(0, batch_step - 1 - max_async_level) // every * every
