"""A language model judges the answer, behind any endpoint that speaks OpenAI's chat completions.

Every question is asked once: its answer is kept, in memory and, with `cache`, in a file that survives the run, and
those who ask the same at the same time share it. What the judge answered is kept, not the score, so that another way to
read it costs nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import math
import random
import re
import string
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headrace.environments.rewards.answer_cache import AnswerCache
from headrace.environments.rewards.base import Counts, Data, gold_of
from headrace.environments.rewards.registry import register_with_part
from headrace.errors import BadInput, Failure
from headrace.inference.client.openai_client import OpenAIClient, OpenAIError

log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
"""Seconds before a question is asked again, doubled each time; a server may ask for more."""
LONGEST_WISH = 300.0
"""Seconds that a server may ask for."""
EMPHASIS = r"""[\s*_`"']{0,9}+"""
ANNOUNCED = re.compile(
    rf"(?i)(?<![^\W_])score{EMPHASIS}(?:(?:\([^()\n]{{0,40}}+\){EMPHASIS})?+[:=]|(?<!score)(?=[-+.\d])){EMPHASIS}"
)
"""`Score: `, whatever emphasis it has, or `score ` before what may be a number."""
NUMBER = r"\d++(?:\.\d++)?+|\.\d++"
WRITTEN_SCORE = re.compile(
    rf"(?i)({NUMBER})(?:[ \t*_`(]{{0,9}}+(?:(%)|(?:/|(?:out )?of )[ \t*_`]{{0,9}}+({NUMBER})))?+"
    r"(?![^\W_]|[.,]\d|[ \t*_`(]{0,9}+(?:[/%]|(?:out )?of\b)|[ \t]{0,9}+[-\u2013][ \t]{0,9}+\d)"
)
"""A number by itself, a percentage, or so many of so many; neither a range nor any other part of something longer."""


class JudgeFailed(Failure):
    """The judge gave no score. The message says why."""


def _last_number(pattern: str) -> Callable[[str], float | None]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise BadInput(f"not a regular expression: {error}", key="parse", value=pattern) from error
    if not expression.groups:
        raise BadInput("it has no group to read the score from", key="parse", value=pattern)

    def read(answer: str) -> float | None:
        found = [match[1] for match in expression.finditer(answer)]
        return float(found[-1]) if found else None

    return read


def zero_to_one(answer: str) -> float | None:
    """What the last `Score:` says: a number from 0 to 1, or a share such as 8/10, 8 out of 10 or 80%.

    None if just there is nothing of the kind: an earlier score is not what the judge ended with.
    """
    starts = [announced.end() for announced in ANNOUNCED.finditer(answer)]
    written = WRITTEN_SCORE.match(answer, starts[-1]) if starts else None
    if written is None:
        return None
    score, most = float(written[1]), 100.0 if written[2] else float(written[3] or 1)
    return score / most if score <= most and most > 0 else None


class _Question:
    """What is being asked, and how many wait for the answer."""

    def __init__(self, task: asyncio.Task[str]) -> None:
        self.task = task
        self.waiting = 0


@register_with_part("judge_reward")
class Judge:
    """The score that a language model gives to the answer, from 0 to 1 unless `parse` reads it otherwise.

    `prompt` is a template: `{text}` is the answer, and each other name in braces a field of the task. The default
    `parse` expects the judge to end with `Score: X`. Another one is a regular expression, whose group 1 in its last
    match is the score, or a function of the judge's text that gives a number, or None if it finds no score.

    `timeout` is in seconds, for one request; `retries` is how often one that failed is sent again. Then `on_failure`
    is "error", which costs the rollout, or the score to give instead. `calls`, `cached` and `failures` count, for the
    log. An environment in worker processes has a judge in each: `max_concurrent` and `requests_per_minute` hold for
    one.
    """

    name = "judge"
    bounded = True

    def __init__(
        self,
        base_url: str,
        model: str,
        prompt: str,
        *,
        system: str | None = None,
        api_key_var: str | None = "OPENAI_API_KEY",
        headers: Mapping[str, str] | None = None,
        parse: str | Callable[[str], float | None] = zero_to_one,
        temperature: float | None = 0.0,
        max_tokens: int | None = None,
        timeout: float = 30.0,
        max_concurrent: int = 16,
        requests_per_minute: float | None = None,
        retries: int = 2,
        cache: str | Path | None = None,
        on_failure: Literal["error"] | float = "error",
    ) -> None:
        if isinstance(on_failure, str) and on_failure != "error":
            raise BadInput("expected 'error' or a number", key="on_failure", value=on_failure)
        self.counts = Counts(
            self.name, calls="requests", cached="answers from the cache", failures="answers without a score"
        )
        self._client = OpenAIClient(base_url, model, api_key_var, timeout, headers, max_concurrent)
        self._parts = _parsed_template(prompt)
        self._system = system
        self._parse = _last_number(parse) if isinstance(parse, str) else parse
        self._sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next_at = -math.inf
        self._retries = retries
        self._cache = AnswerCache(Path(cache) if cache is not None else None)
        self._on_failure = on_failure
        self._asking: dict[str, _Question] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line: asyncio.Lock

    async def __call__(self, text: str, data: Data) -> float:
        try:
            return self._score(await self._answer(self._messages(text, data)))
        except (OpenAIError, JudgeFailed) as error:
            self.counts.add("failures")
            if self._on_failure == "error":
                raise JudgeFailed(f"the judge gave no score: {error}") from error
            return float(self._on_failure)

    async def close(self) -> None:
        asking = [question.task for question in self._asking.values()]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._client.close()
        self._cache.close()
        if any(self.counts.values()):
            log.info("reward %r: %d requests, %d answers from the cache, %d failures", self.name, *self.counts.values())

    def _messages(self, text: str, data: Data) -> list[dict[str, str]]:
        """Values are put in as they are: what is in braces in them stays."""
        values = (
            "" if field is None else text if field == "text" else _written(gold_of(data, field))
            for _, field in self._parts
        )
        content = "".join(literal + value for (literal, _), value in zip(self._parts, values, strict=True))
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": _valid_unicode(content)}]

    async def _answer(self, messages: list[dict[str, str]]) -> str:
        """What is known, or else asked; a cancelled caller takes the question from nobody else."""
        asked = [self._client.base_url, self._client.model, messages, self._sampling]
        key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        if (known := self._cache.get(key)) is not None:
            self.counts["cached"] += 1
            return known
        question = self._asking.get(key)
        if question is None:
            question = self._asking[key] = _Question(asyncio.create_task(self._ask(key, messages)))
        else:
            self.counts["cached"] += 1
        question.waiting += 1
        try:
            return await asyncio.shield(question.task)
        finally:
            question.waiting -= 1
            if not question.waiting:  # if it is not answered yet, nobody wants to know any more
                question.task.cancel()
                del self._asking[key]

    async def _ask(self, key: str, messages: list[dict[str, str]]) -> str:
        for attempt in itertools.count():
            await self._wait_for_turn()
            self.counts["calls"] += 1
            try:
                answer = await self._client.chat(messages, **self._sampling)
                break
            except OpenAIError as error:
                if not error.transient or attempt >= self._retries:
                    raise
                await asyncio.sleep(_delay(attempt, error.retry_after))
        if answer.finish_reason == "length":
            raise JudgeFailed(f"its answer was cut at {answer.usage.completion_tokens} tokens: raise max_tokens")
        self._score(answer.text)  # what cannot be read is not kept
        self._cache.put(key, answer.text)
        return answer.text

    async def _wait_for_turn(self) -> None:
        """The first in line waits for the clock, the others for the first: whoever leaves the line costs no turn."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._line = loop, asyncio.Lock()
        async with self._line:
            turn = max(loop.time(), self._next_at)
            if turn > loop.time():
                await asyncio.sleep(turn - loop.time())
            self._next_at = turn + self._interval

    def _score(self, answer: str) -> float:
        score = self._parse(answer)
        if score is None or not math.isfinite(score):
            raise JudgeFailed(f"no score can be read in its answer, which ends {answer[-200:]!r}")
        return float(score)


def _delay(attempt: int, wanted: float | None) -> float:
    """Half of it is by chance, so that those who failed together do not come back together."""
    own = min(FIRST_DELAY * 2.0**attempt, LONGEST_DELAY) * random.uniform(0.5, 1.0)
    return max(own, min(wanted or 0.0, LONGEST_WISH))


def _parsed_template(prompt: str) -> list[tuple[str, str | None]]:
    """Texts, each with the field that follows it."""
    fix = "Write {text} for the answer, {name} for a field of the task, and {{ or }} for a brace."
    refuse = partial(BadInput, key="prompt", value=prompt, fix=fix)
    try:
        parts = list(string.Formatter().parse(prompt))
    except ValueError as error:
        raise refuse(f"not a template: {error}") from error
    for _, field, form, conversion in parts:
        if field == "" or form or conversion:
            raise refuse(f"{{{field}...}} is not the name of a field")
    if "text" not in (field for _, field, _, _ in parts):
        raise refuse("it does not show the answer")
    return [(literal, field) for literal, field, _, _ in parts]


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _valid_unicode(text: str) -> str:
    """With a sign in place of each lone surrogate, which no server would take."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
