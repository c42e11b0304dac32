"""Messages as clients send them, made into what every chat format knows.

Chat formats leave out what they do not know, without a word: it is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.inference.backend import InvalidRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""What OpenAI calls a role, and what chat formats do."""


def rendered_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with roles that chat formats have and text as content.

    Raises `InvalidRequest` that names what is at fault.
    """
    if not messages:
        raise InvalidRequest("messages is empty")
    return [_rendered(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _rendered(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        *others, last = ROLES
        raise InvalidRequest(f"{where}.role must be {', '.join(others)} or {last}, not {role!r:.60}")
    if message.get("function_call"):
        raise InvalidRequest(f"{where}.function_call is of an older interface: send tool_calls")
    _check_calls(f"{where}.tool_calls", message.get("tool_calls"))
    return {**message, "role": ROLES[role], "content": _text(f"{where}.content", message.get("content"))}


def _text(where: str, content: Any) -> str:
    if isinstance(content, str | None):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be text or a list of parts")
    return "".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(f'{where} must be {{"type": "text", "text": ...}}: the model reads text alone')
    return text


def _check_calls(where: str, calls: Any) -> None:
    if not isinstance(calls, list | None):
        raise InvalidRequest(f"{where} must be a list of calls")
    for index, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"{where}[{index}].function.name must be the name of what was called")
