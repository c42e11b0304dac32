"""What has been said so far, and how replies are sampled. No terminal, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.errors import BadInput

Message = dict[str, Any]

SETTINGS: Mapping[str, type[int] | type[float]] = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}
"""What can be set of the sampling, in OpenAI's words; what is not set is the server's choice."""
UNSET = "default"
"""Said instead of a value: leave it to the server again."""


class Conversation:
    """Messages in turn, after the system message. A user message waits for its reply."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[Message] = []
        self.settings: dict[str, int | float] = {}

    def ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})

    def answer(self, message: Message) -> None:
        self.messages.append(message)

    def withdraw(self) -> None:
        """Take back a question that got no answer."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def reset(self) -> None:
        """Forget what was said; the model's part and the settings stay."""
        self.messages.clear()

    def set(self, name: str, text: str) -> None:
        """Raises `BadInput` for what is no setting, or not a value of it."""
        if name not in SETTINGS:
            raise BadInput("unknown setting", key=name, fix=f"Known: {', '.join(SETTINGS)}.")
        if text == UNSET:
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = SETTINGS[name](text)
        except ValueError as error:
            kind = "a whole number" if SETTINGS[name] is int else "a number"
            raise BadInput(f"must be {kind}, or {UNSET}", key=name, value=text) from error

    def transcript(self) -> list[Message]:
        """All of it, thoughts included."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def prompt(self) -> list[Message]:
        """What the next answer follows. Thoughts of earlier answers are left out, as chat formats have it."""
        return [{key: value for key, value in said.items() if key != "reasoning_content"} for said in self.transcript()]

    def json_lines(self) -> str:
        """One message per line."""
        return "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in self.transcript())
