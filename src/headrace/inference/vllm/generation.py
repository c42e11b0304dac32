"""One request to vLLM in progress, streamed only if its chunks are read.

A stream costs far more CPU per token in vLLM's server and here. The request is sent when its result or its chunks are
first awaited, or shortly after its creation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from headrace.inference.backend import EngineError, EngineStopped, GenerationResult, RequestCancelled, TokenChunk
from headrace.inference.client.errors import server_message
from headrace.inference.client.http import HttpClient, NotAStream, ServerUnreachable
from headrace.inference.schema import SamplingParams
from headrace.inference.vllm import wire
from headrace.rollout.version import Version

SEND_DELAY_S = 0.05
"""After which a request is sent even if neither its result nor its chunks are awaited."""
REQUEST_TIMEOUT_S = 7 * 86400.0
"""A request may be queued or paused for as long as its caller waits."""
EXIT_TIMEOUT_S = 5.0
"""For vLLM to exit after a request has failed because its engine died."""


class VllmGeneration:
    """A request and its result.

    `body(stream)` encodes the request, `admit` waits until it may be sent, `on_end` is called once at its end, and
    `dead` has the reason if vLLM dies.
    """

    def __init__(
        self,
        http: HttpClient,
        url: str,
        *,
        token_ids: list[int],
        params: SamplingParams,
        body: Callable[[bool], bytes],
        headers: dict[str, str],
        admit: Callable[[], Awaitable[None]],
        on_end: Callable[[], None],
        dead: asyncio.Future[str],
        decode: Callable[[list[int]], str],
        version: Version,
        pinned: bool,
    ) -> None:
        self._http, self._url = http, url
        self._token_ids, self._params = token_ids, params
        self._body, self._headers = body, headers
        self._admit, self._on_end, self._dead, self._decode = admit, on_end, dead, decode
        self.marks = [(version, 0)]
        """(version, number of tokens at its load), for a vLLM that does not report versions."""
        self.pinned = pinned
        """Whether all its tokens are sampled by the version that it started with."""
        self._chunks: list[TokenChunk] = []
        self._news = asyncio.Event()
        self._streams = False
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[GenerationResult] = loop.create_future()
        self._timer = loop.call_later(SEND_DELAY_S, self._start)

    async def result(self) -> GenerationResult:
        self._start()
        return await asyncio.shield(self._ended)  # a cancelled wait does not cancel the request

    async def chunks(self) -> AsyncIterator[TokenChunk]:
        self._streams |= self._task is None and self._params.prompt_logprobs is None  # streams lack them
        self._start()
        sent = 0
        while True:
            self._news.clear()
            ended = self._ended.done()
            while sent < len(self._chunks):
                sent += 1
                yield self._chunks[sent - 1]
            if ended:
                self._ended.result()  # raises its error
                return
            await self._news.wait()

    def cancel(self) -> None:
        self.fail(RequestCancelled("the request was cancelled"))

    def fail(self, error: EngineError) -> None:
        """End it with an error, unless it has ended. vLLM aborts it when the connection closes."""
        if self._task is not None:
            self._task.cancel()
        self._end(error)

    def _start(self) -> None:
        self._timer.cancel()
        if self._task is None and not self._ended.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._admit()
            result = await (self._streamed() if self._streams else self._whole())
        except EngineError as error:
            self._end(error)
        except (TimeoutError, ServerUnreachable) as error:
            self._end(await self._failure(f"vLLM cannot be reached: {error}", may_be_dying=True))
        except Exception as error:  # an invalid response must end the request
            self._end(EngineError(f"invalid response of vLLM: {type(error).__name__}: {error}"))
        else:
            self._end(result)

    async def _whole(self) -> GenerationResult:
        response = await self._http.request(
            "POST", self._url, wire.ROUTE, self._body(False), REQUEST_TIMEOUT_S, self._headers
        )
        if response.status != 200:
            problem = server_message(response.content)
            raise await self._failure(f"vLLM refused the request: {problem}", may_be_dying=response.status >= 500)
        body = wire.decode_response(response.content)
        [choice] = body.choices
        self._chunks.append(wire.token_chunk(choice, self._params))
        return self._result(body, choice)

    async def _streamed(self) -> GenerationResult:
        events = self._http.stream("POST", self._url, wire.ROUTE, self._body(True), REQUEST_TIMEOUT_S, self._headers)
        last, end = wire.VllmResponse(), wire.Choice()
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    last = wire.decode_response(event)
                    if last.error is not None:
                        problem = server_message(event)
                        raise await self._failure(f"vLLM could not finish the request: {problem}", may_be_dying=True)
                    for choice in last.choices:
                        end = choice
                        if choice.token_ids:
                            self._chunks.append(wire.token_chunk(choice, self._params))
                            self._news.set()
            except NotAStream as refused:
                problem = server_message(refused.response.content)
                may_be_dying = refused.response.status >= 500
                raise await self._failure(
                    f"vLLM refused the request: {problem}", may_be_dying=may_be_dying
                ) from refused
        return self._result(last, end)

    def _result(self, response: wire.VllmResponse, choice: wire.Choice) -> GenerationResult:
        """Assemble the result; `response` has the usage and `choice` the finish reason."""
        reason = wire.finish_reason(choice)
        tokens = [token for chunk in self._chunks for token in chunk.token_ids]
        tops = [best for chunk in self._chunks for best in chunk.top_logprobs or []]
        prompt, prompt_tops = wire.prompt_logprobs(response, self._token_ids, self._params)
        spans = (
            [] if self.pinned else [(Version.parse(s.version), s.start, s.end) for s in choice.weight_versions or []]
        )
        return GenerationResult(
            tokens,
            [logprob for chunk in self._chunks for logprob in chunk.logprobs],
            spans or wire.counted_spans(self.marks, len(tokens)),
            reason,
            self._stop_reason(reason, choice, tokens),
            prompt_logprobs=prompt,
            top_logprobs=tops if self._params.logprobs else None,
            prompt_top_logprobs=prompt_tops,
            cached_tokens=response.cached_tokens,
        )

    def _stop_reason(self, reason: str, choice: wire.Choice, tokens: list[int]) -> int | str | None:
        """Return the stop token or string of the request. Older versions of vLLM do not report the string."""
        if reason != "stop" or not tokens:
            return None
        if isinstance(choice.stop_reason, str):
            return choice.stop_reason
        if tokens[-1] in self._params.stop_token_ids:
            return tokens[-1]
        text = self._decode(tokens) if self._params.stop else ""
        return next((stop for stop in self._params.stop if stop in text), None)

    async def _failure(self, problem: str, *, may_be_dying: bool) -> EngineError:
        """Return the error of a failed request: `EngineStopped` if vLLM died."""
        await asyncio.wait({self._dead}, timeout=EXIT_TIMEOUT_S if may_be_dying else 0)
        return EngineStopped(self._dead.result()) if self._dead.done() else EngineError(problem)

    def _end(self, outcome: GenerationResult | EngineError) -> None:
        if self._ended.done():
            return
        self._timer.cancel()
        if isinstance(outcome, GenerationResult):
            self._ended.set_result(outcome)
        else:
            self._ended.set_exception(outcome)
            self._ended.exception()  # mark it as retrieved
        self._news.set()
        self._on_end()
