"""One request to vLLM in progress, streamed only if its chunks are read.

A stream costs far more CPU per token in vLLM's server and here. The request is sent when its result or its chunks are
first awaited, or shortly after its creation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from headrace.inference.backend import (
    EngineError,
    EngineStopped,
    Generation,
    GenerationResult,
    InvalidRequest,
    RequestCancelled,
    TokenChunk,
)
from headrace.inference.client.errors import server_message
from headrace.inference.client.http import HttpClient, HttpResponse, NotAStream, ServerUnreachable
from headrace.inference.schema import SamplingParams
from headrace.inference.vllm import wire
from headrace.rollout.version import Version

SEND_DELAY_S = 0.05
"""After which a request is sent even if neither its result nor its chunks are awaited."""
REQUEST_TIMEOUT_S = 7 * 86400.0
"""A request may be queued or paused for as long as its caller waits."""
EXIT_TIMEOUT_S = 5.0
"""For vLLM to exit after a request has failed because its engine died."""


@dataclass(eq=False, kw_only=True)
class VllmGeneration(Generation):
    """A request and its result."""

    http: HttpClient
    url: str
    headers: dict[str, str]
    token_ids: list[int]
    params: SamplingParams
    encode: Callable[[bool], Awaitable[bytes]]
    """Waits until the request may be sent, and returns its body; the argument is whether it is streamed."""
    on_end: Callable[[], None]
    """Called once at the end of the request."""
    dead: asyncio.Future[str]
    """Has the reason if vLLM dies."""
    decode: Callable[[list[int]], str]
    marks: list[tuple[Version, int]]
    """(version, number of tokens at its load), for a vLLM that does not report versions."""
    pinned: bool
    """Whether all its tokens are sampled by the version that it started with."""

    def __post_init__(self) -> None:
        super().__init__()
        self._streams = False
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(SEND_DELAY_S, self._start)

    async def result(self) -> GenerationResult:
        self._start()
        return await super().result()

    def chunks(self) -> AsyncIterator[TokenChunk]:
        self._streams |= self._task is None and self.params.prompt_logprobs is None  # streams lack them
        self._start()
        return super().chunks()

    def cancel(self) -> None:
        self.fail(RequestCancelled("the request was cancelled"))

    def fail(self, error: EngineError) -> None:
        """End it with an error, unless it has ended. vLLM aborts it when the connection closes."""
        if self._task is not None:
            self._task.cancel()
        self.end(error)

    def _start(self) -> None:
        self._timer.cancel()
        if self._task is None and not self._ended.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Send the request, and end it with its result or its error."""
        try:
            body = await self.encode(self._streams)
            result = await (self._streamed(body) if self._streams else self._whole(body))
        except (EngineError, InvalidRequest) as error:
            self.end(error)
        except (TimeoutError, ServerUnreachable) as error:
            self.end(await self._failure(f"vLLM cannot be reached: {error}"))
        except Exception as error:  # an invalid response must end the request
            self.end(EngineError(f"invalid response of vLLM: {type(error).__name__}: {error}"))
        else:
            self.end(result)

    async def _whole(self, content: bytes) -> GenerationResult:
        response = await self.http.request("POST", self.url, wire.ROUTE, content, REQUEST_TIMEOUT_S, self.headers)
        if response.status != 200:
            raise await self._refusal(response)
        body = wire.decode_response(response.content)
        [choice] = body.choices
        self.add(wire.token_chunk(choice, self.params))
        return self._result(body, choice)

    async def _streamed(self, content: bytes) -> GenerationResult:
        events = self.http.stream("POST", self.url, wire.ROUTE, content, REQUEST_TIMEOUT_S, self.headers)
        last, end = wire.VllmResponse(), wire.Choice()
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    last = wire.decode_response(event)
                    if last.error is not None:
                        raise await self._failure(f"vLLM could not finish the request: {server_message(event)}")
                    for choice in last.choices:
                        end = choice
                        if choice.token_ids:
                            self.add(wire.token_chunk(choice, self.params))
            except NotAStream as refused:
                raise await self._refusal(refused.response) from refused
        return self._result(last, end)

    def _result(self, response: wire.VllmResponse, choice: wire.Choice) -> GenerationResult:
        """Assemble the result; `response` has the usage and `choice` the finish reason."""
        reason = wire.finish_reason(choice)
        if self.params.routed_experts and choice.routed_experts is None:
            raise EngineError("vLLM returned no routed_experts: it records them on GPUs, with inference.routed_experts")
        tokens = [token for chunk in self._chunks for token in chunk.token_ids]
        tops = [best for chunk in self._chunks for best in chunk.top_logprobs or []]
        prompt, prompt_tops = wire.prompt_logprobs(response, self.token_ids, self.params)
        stamped = [] if self.pinned else choice.weight_versions or []
        spans = [(Version.parse(span.version), span.start, span.end) for span in stamped]
        return GenerationResult(
            tokens,
            [logprob for chunk in self._chunks for logprob in chunk.logprobs],
            spans or wire.counted_spans(self.marks, len(tokens)),
            reason,
            self._stop_reason(reason, choice, tokens),
            prompt_logprobs=prompt,
            top_logprobs=tops if self.params.logprobs else None,
            prompt_top_logprobs=prompt_tops,
            cached_tokens=response.cached_tokens,
            logprobs_mode=self.params.logprobs_mode,
            routed_experts=choice.routed_experts if self.params.routed_experts else None,
        )

    def _stop_reason(self, reason: str, choice: wire.Choice, tokens: list[int]) -> int | str | None:
        """Return the stop token or string of the request. Older versions of vLLM do not report the string."""
        if reason != "stop" or not tokens:
            return None
        if isinstance(choice.stop_reason, str):
            return choice.stop_reason
        if tokens[-1] in self.params.stop_token_ids:
            return tokens[-1]
        text = self.decode(tokens) if self.params.stop else ""
        return next((stop for stop in self.params.stop if stop in text), None)

    async def _refusal(self, response: HttpResponse) -> EngineError | InvalidRequest:
        """Return the error of a request that vLLM answered with an error status."""
        message = server_message(response.content)
        if response.status == 400 and self.params.structured_outputs is not None:  # vLLM alone checks these
            return InvalidRequest(message, key="structured_outputs")
        problem = f"vLLM refused the request: {message}"
        return await self._failure(problem, EXIT_TIMEOUT_S if response.status >= 500 else 0)

    async def _failure(self, problem: str, timeout_s: float = EXIT_TIMEOUT_S) -> EngineError:
        """Return the error of a failed request: `EngineStopped` if vLLM dies within the timeout."""
        await asyncio.wait({self.dead}, timeout=timeout_s)
        return EngineStopped(self.dead.result()) if self.dead.done() else EngineError(problem)

    def end(self, outcome: GenerationResult | Exception) -> None:
        if not self._ended.done():
            self._timer.cancel()
            super().end(outcome)
            self.on_end()
