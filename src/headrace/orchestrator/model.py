"""The policy as the orchestrator reaches it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from renderers.base import Renderer

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import Health
from headrace.orchestrator.watcher import WeightWatcher
from headrace.text.tokenizer import Tokenizer


class Model(msgspec.Struct):
    client: EngineClient
    engines: Sequence[Health]
    watcher: WeightWatcher
    tokenizer: Tokenizer
    renderer: Renderer
    in_turns: bool = False
    """Whether its engines stand still while the trainer computes."""

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have on every engine, prompt and completion together."""
        return min(health.max_model_len for health in self.engines)

    @property
    def vocab_size(self) -> int:
        """Tokens that it has embeddings for; a tokenizer may know fewer."""
        return min(health.vocab_size for health in self.engines)
