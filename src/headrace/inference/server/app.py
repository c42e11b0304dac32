"""The engine's HTTP interface: token ids in and out, chat, and what the trainer's side calls to move weights."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.inference.embedded.request import InvalidRequest, Request, Result
from headrace.inference.embedded.thread import Courier, EngineThread
from headrace.inference.schema import (
    ChoiceLogprobs,
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    Health,
    PromptLogprob,
    TokenLogprob,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    Usage,
    WeightVersionSpan,
)
from headrace.inference.server.chat import Chat, ChatRequest
from headrace.inference.server.replies import (
    HEADERS,
    ClientGone,
    NotServed,
    answering,
    on_bug,
    on_http_error,
    read_body,
    reply,
)
from headrace.rollout.version import Version


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """In vLLM's form: a text, or a conversation as it would be sampled from."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    """Of a text: whether the tokenizer adds what it begins texts with. A conversation has what its format gives it."""


_generate_decoder = msgspec.json.Decoder(GenerateRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_update_decoder = msgspec.json.Decoder(UpdateWeightsRequest)


class App:
    """The routes, over one engine thread. Must be made inside the event loop that will serve it."""

    def __init__(self, thread: EngineThread, chat: Chat) -> None:
        self.thread = thread
        self.engine = thread.engine
        self.model_name = chat.model_name
        self._chat = chat
        self._courier = Courier(asyncio.get_running_loop())
        self._names = {self.model_name, Path(self.model_name).name}
        self._created = int(time.time())

    def asgi(self) -> Starlette:
        routes = {
            "/health": (self.health, "GET"),
            "/v1/models": (self.models, "GET"),
            "/v1/chat/completions": (self.chat, "POST"),
            "/inference/v1/generate": (self.generate, "POST"),
            "/tokenize": (self.tokenize, "POST"),
            "/pause": (self.pause, "POST"),
            "/resume": (self.resume, "POST"),
            "/update_weights": (self.update_weights, "POST"),
        }
        return Starlette(
            routes=[Route(path, answering(handler), methods=[method]) for path, (handler, method) in routes.items()],
            exception_handlers={HTTPException: on_http_error, Exception: on_bug},
        )

    async def health(self, _: HttpRequest) -> Response:
        return reply(self.describe())

    def describe(self) -> Health:
        engine = self.engine
        return Health(
            status="ok",
            version=str(engine.version),
            model=self.model_name,
            running=len(engine.running),
            waiting=len(engine.urgent) + len(engine.waiting),
            paused=engine.paused,
            capacity=engine.max_running,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
        )

    async def models(self, _: HttpRequest) -> Response:
        entry = {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "max_model_len": self.engine.max_model_len,
        }
        return reply({"object": "list", "data": [entry]})

    async def generate(self, http: HttpRequest) -> Response:
        body = await read_body(http, _generate_decoder)
        if body.stream:
            raise InvalidRequest("stream: /inference/v1/generate answers in one piece; leave it out or set it to false")
        self._check_model(body.model)
        request = self.thread.submit(body.token_ids, body.sampling_params, body.cache_salt, urgent=body.urgent)
        [result] = await self._results(http, [request])
        return reply(generate_response(body, result, self.model_name))

    async def chat(self, http: HttpRequest) -> Response:
        body = await read_body(http, _chat_decoder)
        self._check_model(body.model)
        prompt = self._chat.prompt(body)
        requests = [self.thread.submit(prompt, params) for params in self._chat.params(body)]
        if body.stream:
            events = self._chat.stream(body, prompt, lambda: self._results(http, requests), len(requests))
            return StreamingResponse(events, headers=HEADERS, media_type="text/event-stream")
        return reply(self._chat.reply(body, prompt, await self._results(http, requests)))

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await read_body(http, _tokenize_decoder)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt, a text, or messages, a conversation")
        if body.messages is not None:
            tokens = self._chat.prompt(ChatRequest(messages=body.messages, tools=body.tools))
        else:
            tokens = self._chat.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
        return reply({"count": len(tokens), "max_model_len": self.engine.max_model_len, "tokens": tokens})

    async def pause(self, _: HttpRequest) -> Response:
        await asyncio.to_thread(self.thread.pause)
        return reply(self.describe())

    async def resume(self, _: HttpRequest) -> Response:
        await asyncio.to_thread(self.thread.resume)
        return reply(self.describe())

    async def update_weights(self, http: HttpRequest) -> Response:
        body = await read_body(http, _update_decoder)
        version = Version(body.incarnation, body.step)
        checksum = await asyncio.to_thread(self.thread.update_weights, Path(body.path), version)
        return reply(UpdateWeightsResponse(body.incarnation, body.step, checksum))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise NotServed(f"model: {name!r} is not served here; {self.model_name!r} is")

    async def _results(self, http: HttpRequest, requests: Sequence[Request]) -> list[Result]:
        """Wait for the results; a client that hangs up cancels its requests."""
        results = asyncio.gather(*[self._courier.expect(request) for request in requests])
        hangup = asyncio.ensure_future(http.receive())  # after the body, only a disconnect comes
        hangup.add_done_callback(lambda _: results.cancel())
        try:
            return await results
        except asyncio.CancelledError:
            if hangup.done() and not hangup.cancelled():
                raise ClientGone from None
            raise
        finally:
            hangup.cancel()
            for request in requests:
                if not request.future.done():
                    self.thread.cancel(request)


def generate_response(body: GenerateRequest, result: Result, model_name: str) -> GenerateResponse:
    choice = GenerateChoice(
        index=0,
        token_ids=result.token_ids,
        finish_reason=result.finish_reason,
        logprobs=None if body.sampling_params.logprobs is None else _choice_logprobs(result),
        weight_versions=[WeightVersionSpan(str(version), start, end) for version, start, end in result.version_spans],
        stop_reason=result.stop_reason,
        truncated_logprobs=None if body.sampling_params.logprobs is None else result.truncated_logprobs,
    )
    return GenerateResponse(
        request_id=body.request_id or uuid.uuid4().hex,
        choices=[choice],
        model=model_name,
        created=int(time.time()),
        usage=Usage(len(body.token_ids), len(result.token_ids), len(body.token_ids) + len(result.token_ids)),
        prompt_logprobs=None if result.prompt_logprobs is None else _prompt_logprobs(body.token_ids, result),
    )


def _choice_logprobs(result: Result) -> ChoiceLogprobs:
    pairs = zip(result.token_ids, result.logprobs, strict=True)
    return ChoiceLogprobs([TokenLogprob(token, logprob, f"token_id:{token}") for token, logprob in pairs])


def _prompt_logprobs(token_ids: list[int], result: Result) -> list[dict[int, PromptLogprob] | None]:
    """vLLM's form: one table per token, none for the first, which nothing predicts."""
    known = zip(token_ids[1:], (result.prompt_logprobs or [])[1:], strict=True)
    return [None, *({token: PromptLogprob(logprob)} for token, logprob in known)]
