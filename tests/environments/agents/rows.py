"""Tasks for agents, and what their results are worth."""

from __future__ import annotations

from typing import Any


def tasks(count: int = 3) -> list[dict[str, Any]]:
    return [{"question": f"question {number}", "answer": f"answer {number}"} for number in range(count)]


def reward(result: Any, data: dict[str, Any], messages: list[dict[str, Any]]) -> float:
    return float(result == data["answer"])


async def named_rewards(result: Any, data: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, float]:
    return {"right": float(result == data["answer"]), "length": len(messages) / 10}


def gold(data: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    return data["answer"]


def printable(result: str, data: dict[str, Any], messages: list[dict[str, Any]]) -> float:
    """The share of letters that can be printed: even random output gets a reward that differs between rollouts."""
    return sum(32 <= ord(letter) < 127 for letter in result) / max(1, len(result))
