"""Reward by a language model behind any endpoint with OpenAI's chat completions.

Each distinct request is sent once: the judge's reply is cached in memory and, with `cache`, in a file, and concurrent
callers share one request. The cache has the reply, not the score, so that another `parse` needs no new requests. Its
file is an SQLite database to which several processes may append at a time; entries never change.
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
import sqlite3
import string
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headrace.environments.rewards.base import Counts, Data, gold_of, register_with_part
from headrace.errors import BadInput, Failure
from headrace.inference.client.openai_client import OpenAIClient, OpenAIError

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Delay before a retry, doubled each time; the server's `Retry-After` may be longer."""
MAX_RETRY_AFTER_S = 300.0
CACHE_SCHEMA = 1
LOCK_TIMEOUT_S = 10.0
"""Time to wait for another process that writes to the cache."""
EMPHASIS = r"""[\s*_`"']{0,9}+"""
ANNOUNCED = re.compile(
    rf"(?i)(?<![^\W_])score{EMPHASIS}(?:(?:\([^()\n]{{0,40}}+\){EMPHASIS})?+[:=]|(?<!score)(?=[-+.\d])){EMPHASIS}"
)
"""`Score: ` with any emphasis, or `score ` before a number."""
NUMBER = r"\d++(?:\.\d++)?+|\.\d++"
WRITTEN_SCORE = re.compile(
    rf"(?i)({NUMBER})(?:[ \t*_`(]{{0,9}}+(?:(%)|(?:/|(?:out )?of )[ \t*_`]{{0,9}}+({NUMBER})))?+"
    r"(?![^\W_]|[.,]\d|[ \t*_`(]{0,9}+(?:[/%]|(?:out )?of\b)|[ \t]{0,9}+[-\u2013][ \t]{0,9}+\d)"
)
"""A number, a percentage or a fraction such as 8 out of 10; not a range, nor part of a longer expression."""


class JudgeFailed(Failure):
    """The judge gave no score; the message has the reason."""


def _compile_score_pattern(pattern: str) -> Callable[[str], float | None]:
    """Return a function that reads the score from group 1 of the last match in a judge's reply."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise BadInput(f"not a regular expression: {error}", key="parse", value=pattern) from error
    if not expression.groups:
        raise BadInput("it has no group to read the score from", key="parse", value=pattern)

    def read_score(answer: str) -> float | None:
        scores = [match[1] for match in expression.finditer(answer)]
        return float(scores[-1]) if scores else None

    return read_score


def parse_score(answer: str) -> float | None:
    """Return the score after the last `Score:`: a number from 0 to 1, or a share such as 8/10, 8 out of 10 or 80%.

    None if no score follows there: an earlier score is not the judge's final one.
    """
    starts = [announced.end() for announced in ANNOUNCED.finditer(answer)]
    written = WRITTEN_SCORE.match(answer, starts[-1]) if starts else None
    if written is None:
        return None
    score, most = float(written[1]), 100.0 if written[2] else float(written[3] or 1)
    return score / most if score <= most and most > 0 else None


@register_with_part("judge_reward")
class Judge:
    """The score that a language model gives to the answer, from 0 to 1 unless `parse` reads it otherwise.

    `prompt` is a template: `{text}` is the answer, and each other name in braces a field of the task. The default
    `parse` expects the judge to end with `Score: X`. Another one is a regular expression, whose last match has the
    score in group 1, or a function of the judge's reply that returns a number, or None for no score.

    `timeout` is in seconds per request; a failed request is sent again up to `retries` times. Then `on_failure` is
    "error", which fails the rollout, or the score to use instead. With worker processes each has its own judge:
    `max_concurrent` and `requests_per_minute` apply per process.
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
        parse: str | Callable[[str], float | None] = parse_score,
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
        counters = {"calls": "requests", "cached": "answers from the cache", "failures": "answers without a score"}
        self.counts = Counts(self.name, **counters)
        self._client = OpenAIClient(base_url, model, api_key_var, timeout, headers, max_concurrent)
        self._parts = _parse_template(prompt)
        self._system = system
        self._parse = _compile_score_pattern(parse) if isinstance(parse, str) else parse
        self._sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next_at = -math.inf
        self._retries = retries
        self._cache = AnswerCache(Path(cache) if cache is not None else None)
        self._on_failure = on_failure
        self._pending: dict[str, asyncio.Task[str]] = {}
        self._waiting: Counter[str] = Counter()
        """Callers that wait for each request."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rate_limit: asyncio.Lock

    async def __call__(self, text: str, data: Data) -> float:
        try:
            return self._score(await self._answer(self._messages(text, data)))
        except (OpenAIError, JudgeFailed) as error:
            self.counts.add("failures")
            if self._on_failure == "error":
                raise JudgeFailed(f"the judge gave no score: {error}") from error
            return float(self._on_failure)

    async def close(self) -> None:
        tasks = list(self._pending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
        self._cache.close()
        if any(self.counts.values()):
            log.info("reward %r: %d requests, %d answers from the cache, %d failures", self.name, *self.counts.values())

    def _messages(self, text: str, data: Data) -> list[dict[str, str]]:
        """Return the judge's prompt. Braces in the inserted values are kept."""
        content = ""
        for literal, field in self._parts:
            value = "" if field is None else text if field == "text" else gold_of(data, field)
            content += literal + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        content = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # no lone surrogates
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": content}]

    async def _answer(self, messages: list[dict[str, str]]) -> str:
        """Return the judge's reply from the cache, from a request in flight, or from a new one.

        A request is cancelled when all callers that wait for it are.
        """
        request = [self._client.base_url, self._client.model, messages, self._sampling]
        key = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        if (cached := self._cache.get(key)) is not None:
            self.counts["cached"] += 1
            return cached
        if key in self._pending:
            self.counts["cached"] += 1
        else:
            self._pending[key] = asyncio.create_task(self._send(key, messages))
        self._waiting[key] += 1
        try:
            return await asyncio.shield(self._pending[key])
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self._pending.pop(key).cancel()

    async def _send(self, key: str, messages: list[dict[str, str]]) -> str:
        """Send a request, with retries, and cache the reply if it has a score."""
        for attempt in itertools.count():
            await self._wait_for_rate_limit()
            self.counts["calls"] += 1
            try:
                answer = await self._client.chat(messages, **self._sampling)
                break
            except OpenAIError as error:
                if not error.transient or attempt >= self._retries:
                    raise
                await asyncio.sleep(backoff_s(attempt, error.retry_after))
        if answer.finish_reason == "length":
            raise JudgeFailed(f"its answer was cut at {answer.usage.completion_tokens} tokens: raise max_tokens")
        self._score(answer.text)  # an unreadable reply is not cached
        self._cache.put(key, answer.text)
        return answer.text

    async def _wait_for_rate_limit(self) -> None:
        """Wait until the next request may be sent. A caller that is cancelled here uses up no request."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._rate_limit = loop, asyncio.Lock()
        async with self._rate_limit:
            send_at = max(loop.time(), self._next_at)
            if send_at > loop.time():
                await asyncio.sleep(send_at - loop.time())
            self._next_at = send_at + self._interval

    def _score(self, answer: str) -> float:
        score = self._parse(answer)
        if score is None or not math.isfinite(score):
            raise JudgeFailed(f"no score in its reply, which ends with {answer[-200:]!r}")
        return float(score)


def backoff_s(attempt: int, retry_after_s: float | None) -> float:
    """Return the delay before a retry: exponential with jitter, and at least what the server requests."""
    own = min(FIRST_BACKOFF_S * 2.0**attempt, MAX_BACKOFF_S) * random.uniform(0.5, 1.0)
    return max(own, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


def _parse_template(prompt: str) -> list[tuple[str, str | None]]:
    """Return the literal texts of the template, each with the field that follows it."""
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
        raise refuse("it has no {text}, the answer")
    return [(literal, field) for literal, field, _, _ in parts]


class AnswerCache:
    """An LRU cache of `in_memory` entries, backed by the file `path` if there is one. It reopens after `close`.

    A file that fails later (a full disk) is logged once, and the cache goes on in memory.
    """

    def __init__(self, path: Path | None = None, in_memory: int = 10_000) -> None:
        self._path = path
        self._in_memory = in_memory
        self._entries: OrderedDict[str, str] = OrderedDict()
        self._connection: sqlite3.Connection | None = None
        self._reported = False
        self._connect()  # refuse an unusable file now

    def get(self, key: str) -> str | None:
        if key not in self._entries:
            rows = self._execute("SELECT answer FROM answers WHERE key = ?", key)
            if rows:
                self._keep(key, rows[0][0])
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: str, answer: str) -> None:
        self._keep(key, answer)
        self._execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", key, answer)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _execute(self, statement: str, *values: str) -> list[tuple[str, ...]]:
        file = self._connect()
        if file is None:
            return []
        try:
            return file.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            if not self._reported:
                self._reported = True
                log.warning("the cache %s failed (%s): new replies may be kept in memory only", self._path, error)
            return []

    def _keep(self, key: str, answer: str) -> None:
        self._entries[key] = answer
        if len(self._entries) > self._in_memory:
            self._entries.popitem(last=False)

    def _connect(self) -> sqlite3.Connection | None:
        if self._connection is None and self._path is not None:
            self._connection = _open_cache(self._path)
        return self._connection


def _open_cache(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        [[schema]] = file.execute("PRAGMA user_version").fetchall()
        if schema not in (0, CACHE_SCHEMA):
            fact = f"it has schema {schema}, but this version of headrace reads {CACHE_SCHEMA}"
            raise BadInput(fact, file=path, fix="Name another file.")
        file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID")
        file.execute(f"PRAGMA user_version = {CACHE_SCHEMA}")
    except (sqlite3.Error, OSError) as error:
        raise BadInput(f"cannot be used as a cache: {error}", file=path) from error
    return file
