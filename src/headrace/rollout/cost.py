"""What a sequence costs to train on: one number for packing to balance.

Left out on purpose: prefixes that sequences share, which the trainer computes once, and tokens that need no logits.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Cost(msgspec.Struct, frozen=True):
    """`a` for each token, `b` for each pair of tokens that attend: operations of one forward pass.

    Integers, so that every worker computes the same number whatever the order of its sums.
    """

    a: int
    b: int

    def __post_init__(self) -> None:
        if self.a <= 0 or self.b < 0:
            raise ValueError(f"a token must cost something (a > 0) and a pair nothing less than 0 (b >= 0), not {self}")

    def of(self, lengths: Iterable[int]) -> int:
        """Of sequences that do not see each other."""
        return sum(self.a * n + self.b * n * n for n in lengths)


def cost_of_model(
    *,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int,
) -> Cost:
    """From the values of a model's config, under the names they have there.

    a = layers * (2*h*heads*hd [q] + 4*h*kv*hd [k, v] + 2*heads*hd*h [o] + 6*h*ffn [gate, up, down]) + 2*h*V [lm-head],
    b = 2 * layers * heads * hd [scores and values, of which causality leaves half].
    """
    queries = num_attention_heads * head_dim
    projections = 4 * hidden_size * queries + 4 * hidden_size * num_key_value_heads * head_dim
    feed_forward = 6 * hidden_size * intermediate_size
    return Cost(
        a=num_hidden_layers * (projections + feed_forward) + 2 * hidden_size * vocab_size,
        b=2 * num_hidden_layers * queries,
    )
