"""What an agent asks of `/v1/chat/completions`, and what of it a policy in training can do.

How a policy is sampled is for the run to decide, or what is learned would not be what was sampled: such settings are
ignored, and the log says so once. The same goes for a form that the reply must have, and for calls that must be made:
the policy is not forced, it learns. What would give an agent something else than it asked for is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from headrace.inference.backend import InvalidRequest
from headrace.inference.server.openai_request import MOST_CHOICES, OpenAIRequest, Unsupported, unsupported_in

log = logging.getLogger(__name__)

IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 1),
    "top_p": (None, 1),
    "top_k": (None, -1),
    "min_p": (None, 0),
    "seed": (None,),
    "tool_choice": (None, "auto", "none"),
}
"""Settings that are not obeyed, beside those that no server of ours obeys, and the values that ask for nothing."""
REFUSED = {
    "logprobs": "the policy's logprobs are the run's own",
    "top_logprobs": "the policy's logprobs are the run's own",
    "functions": "it is of an older interface: send tools",
    "function_call": "it is of an older interface: send tool_choice",
    "audio": "the policy writes text alone",
}


class ChatRequest(OpenAIRequest, kw_only=True, forbid_unknown_fields=False):
    messages: list[Any]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Unsupported = True
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None

    def check(self) -> None:
        """Raises `InvalidRequest` for what cannot be done."""
        for field, why in REFUSED.items():
            if getattr(self, field):
                raise InvalidRequest(f"{field} is not supported: {why}")
        if not 1 <= self.choices <= MOST_CHOICES:
            raise InvalidRequest(f"n must be between 1 and {MOST_CHOICES}, not {self.choices}")
        if self.most_tokens is not None and self.most_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {self.most_tokens}")
        for index, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise InvalidRequest(
                    f"tools[{index}] is not a function with a name: the policy can only call functions"
                )

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Those that the policy is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    def in_vain(self) -> Iterator[str]:
        """Settings of its own that are not obeyed."""
        yield from (field for field, neutral in IGNORED.items() if getattr(self, field) not in neutral)
        yield from unsupported_in(self)


class Complaints:
    """Says once of each setting that agents ask for it in vain."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def hear(self, request: ChatRequest) -> None:
        new = [field for field in request.in_vain() if field not in self._told]
        if new:
            self._told.update(new)
            log.warning(
                "an agent sets %s: ignored, since how the policy is sampled is for the run to decide (told once)",
                ", ".join(new),
            )
