"""One request to vLLM under way: asked for in one piece, or as a stream where somebody wants to see it grow.

A stream costs vLLM's server, and us, far more per token, so it is used for nothing else. Which one it shall be shows
when the result, or the pieces, are first asked for; a request that nobody asked about begins by itself soon after.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from headrace.inference.backend import EngineError, EngineStopped, GenerationResult, RequestCancelled, TokenChunk
from headrace.inference.client.http import HttpClient, NotAStream, ServerUnreachable
from headrace.inference.schema import SamplingParams
from headrace.inference.vllm import wire
from headrace.rollout.version import Version

BEGIN_BY = 0.05
"""Seconds after which a request begins, whether or not anybody has asked about it."""
FOREVER = 7 * 86400.0
"""A request may wait in line, or for a pause to end, as long as its caller does."""
DYING = 5.0
"""Seconds that vLLM may take to end after a request has failed because its engine died."""


class VllmGeneration:
    """A request and its result. `body(stream)` is the request in vLLM's form."""

    def __init__(
        self,
        http: HttpClient,
        url: str,
        *,
        token_ids: list[int],
        params: SamplingParams,
        body: Callable[[bool], bytes],
        headers: dict[str, str],
        begin: Callable[[], Awaitable[None]],
        over: Callable[[], None],
        dead: asyncio.Future[str],
        decode: Callable[[list[int]], str],
        version: Version,
        pinned: bool,
    ) -> None:
        self._http, self._url = http, url
        self._token_ids, self._params = token_ids, params
        self._body, self._headers = body, headers
        self._begin_turn, self._over, self._dead, self._decode = begin, over, dead, decode
        self.marks = [(version, 0)]
        """Which weights were loaded when it had how many tokens, for a vLLM that does not tell."""
        self.pinned = pinned
        """Whether the version that it began with samples all of it."""
        self._pieces: list[TokenChunk] = []
        self._news = asyncio.Event()
        self._streams = False
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[GenerationResult] = loop.create_future()
        self._timer = loop.call_later(BEGIN_BY, self._start)

    async def result(self) -> GenerationResult:
        self._start()
        return await asyncio.shield(self._ended)  # whoever gives up waiting says so with `cancel`

    async def chunks(self) -> AsyncIterator[TokenChunk]:
        self._streams |= self._task is None and self._params.prompt_logprobs is None  # which no stream carries
        self._start()
        sent = 0
        while True:
            self._news.clear()
            ended = self._ended.done()
            while sent < len(self._pieces):
                sent += 1
                yield self._pieces[sent - 1]
            if ended:
                self._ended.result()  # raises what it ended with
                return
            await self._news.wait()

    def cancel(self) -> None:
        self.fail(RequestCancelled("the request was cancelled"))

    def fail(self, error: EngineError) -> None:
        """End it with an error, unless it has ended. vLLM notices that nobody listens, and gives it up."""
        if self._task is not None:
            self._task.cancel()
        self._end(error)

    def _start(self) -> None:
        self._timer.cancel()
        if self._task is None and not self._ended.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._begin_turn()
            result = await (self._streamed() if self._streams else self._whole())
        except EngineError as error:
            self._end(error)
        except (TimeoutError, ServerUnreachable) as error:
            self._end(await self._why(f"vLLM cannot be reached: {error}", dying=True))
        except Exception as error:  # whatever an answer may hold: nobody shall wait for ever
            self._end(EngineError(f"vLLM answered what it should not: {type(error).__name__}: {error}"))
        else:
            self._end(result)

    async def _whole(self) -> GenerationResult:
        answer = await self._http.request("POST", self._url, wire.ROUTE, self._body(False), FOREVER, self._headers)
        if answer.status != 200:
            problem = wire.problem_of(answer.content)
            raise await self._why(f"vLLM refused the request: {problem}", dying=answer.status >= 500)
        found = wire.decode_answer(answer.content)
        [choice] = found.choices
        self._pieces.append(wire.piece(choice, self._params))
        return self._result(found, choice)

    async def _streamed(self) -> GenerationResult:
        events = self._http.stream("POST", self._url, wire.ROUTE, self._body(True), FOREVER, self._headers)
        last, end = wire.Answer(), wire.Choice()
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    last = wire.decode_answer(event)
                    if last.error is not None:
                        problem = wire.problem_of(event)
                        raise await self._why(f"vLLM could not finish the request: {problem}", dying=True)
                    for choice in last.choices:
                        end = choice
                        if choice.token_ids:
                            self._pieces.append(wire.piece(choice, self._params))
                            self._news.set()
            except NotAStream as refused:
                problem = wire.problem_of(refused.response.content)
                dying = refused.response.status >= 500
                raise await self._why(f"vLLM refused the request: {problem}", dying=dying) from refused
        return self._result(last, end)

    def _result(self, answer: wire.Answer, choice: wire.Choice) -> GenerationResult:
        """All of it: `answer` has the usage, `choice` how it ended."""
        reason = wire.how_it_ended(choice)
        tokens = [token for piece in self._pieces for token in piece.token_ids]
        tops = [best for piece in self._pieces for best in piece.top_logprobs or []]
        prompt, prompt_tops = wire.prompt_logprobs(answer, self._token_ids, self._params)
        spans = [] if self.pinned else wire.stamped_spans(choice)
        return GenerationResult(
            tokens,
            [logprob for piece in self._pieces for logprob in piece.logprobs],
            spans or wire.counted_spans(self.marks, len(tokens)),
            reason,
            self._stop_reason(reason, choice, tokens),
            prompt_logprobs=prompt,
            top_logprobs=tops if self._params.logprobs else None,
            prompt_top_logprobs=prompt_tops,
            cached_tokens=answer.cached_tokens,
        )

    def _stop_reason(self, reason: str, choice: wire.Choice, tokens: list[int]) -> int | str | None:
        """The stop token or string that the request named. Older versions of vLLM do not say which string it was."""
        if reason != "stop" or not tokens:
            return None
        if isinstance(choice.stop_reason, str):
            return choice.stop_reason
        if tokens[-1] in self._params.stop_token_ids:
            return tokens[-1]
        text = self._decode(tokens) if self._params.stop else ""
        return next((stop for stop in self._params.stop if stop in text), None)

    async def _why(self, problem: str, *, dying: bool) -> EngineError:
        """A request that fails because vLLM is dying shall say so. `dying`: whether that may be what is behind it."""
        await asyncio.wait({self._dead}, timeout=DYING if dying else 0)
        return EngineStopped(self._dead.result()) if self._dead.done() else EngineError(problem)

    def _end(self, outcome: GenerationResult | EngineError) -> None:
        if self._ended.done():
            return
        self._timer.cancel()
        if isinstance(outcome, GenerationResult):
            self._ended.set_result(outcome)
        else:
            self._ended.set_exception(outcome)
            self._ended.exception()  # nobody may be waiting any more
        self._news.set()
        self._over()
