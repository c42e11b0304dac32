"""The server's routes over one engine: OpenAI's, vLLM's, what the trainer's side calls to move weights, and health.

It knows an engine by `Backend` alone. Slow senders cost a connection and no more: bodies are bounded, and uvicorn reads
a connection no faster than it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headrace.inference.backend import (
    Backend,
    Generation,
    GenerationResult,
    InvalidRequest,
    ModelNotFound,
    TokenChunk,
    check_prompt,
    check_token_ids,
)
from headrace.inference.schema import (
    SESSION_HEADER,
    Health,
    SamplingParams,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
)
from headrace.inference.server import chat_stream, generate
from headrace.inference.server.chat import Chat, ChatRequest
from headrace.inference.server.completions import CompletionRequest, Completions
from headrace.inference.server.generate import GenerateBody
from headrace.inference.server.json_values import holds_more
from headrace.inference.server.keys import Keys
from headrace.inference.server.metrics import CONTENT_TYPE, Measured, Metrics
from headrace.inference.server.openai_request import refuse_unsupported
from headrace.inference.server.plain_requests import AdapterRequest, DetokenizeRequest, NoFields, TokenizeRequest
from headrace.inference.server.replies import HEADERS, Handler, answering, body_of, on_bug, on_http_error, reply
from headrace.inference.server.streaming import EventStream, news_of, unless_gone
from headrace.rollout.version import Version

T = TypeVar("T")

MAX_BODY = 32 << 20
LONG_BODY = 1 << 16
"""Bytes of a request beyond which its text is made into tokens beside the event loop, where nobody waits for it."""
OTHER_VALUES = 1 << 17
"""Texts, keys, lists and objects of a request in JSON. Lists of token ids may be as long as a sequence."""
LARGE_BODIES = 8
"""Large bodies that are read at the same time; further ones wait in the network."""
LONGEST_NAME = 256
"""Characters of whatever a request is called by."""
COUNTED_LENGTHS = 16
"""Texts that are only made into tokens, or back, may be so many times as long as those that are sampled from."""


_generate_decoder = msgspec.json.Decoder(GenerateBody)
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_update_decoder = msgspec.json.Decoder(UpdateWeightsRequest)
_adapter_decoder = msgspec.json.Decoder(AdapterRequest)
_no_fields_decoder = msgspec.json.Decoder(NoFields)


class App:
    """The routes. `max_body` is in bytes."""

    def __init__(self, backend: Backend, chat: Chat, keys: Keys | None = None, *, max_body: int = MAX_BODY) -> None:
        self.backend = backend
        self.model_name = chat.model_name
        self.metrics = Metrics()
        self._keys = keys or Keys()
        self._max_body = max_body
        self._large_bodies = asyncio.Semaphore(LARGE_BODIES)
        self._long_text = asyncio.Lock()
        self._chat = chat
        self._completions = Completions(chat.model_name, chat.tokenizer, chat.token_text)
        self._names = {self.model_name, Path(self.model_name).name}
        self._created = int(time.time())

    def asgi(self) -> ASGIApp:
        client, admin = self._for_clients, self._for_admins
        routes = {
            "/health": ("GET", self.health),
            "/v1/models": ("GET", client(self.models)),
            "/v1/models/{name:path}": ("GET", client(self.model)),
            "/metrics": ("GET", client(self.show_metrics)),
            "/v1/chat/completions": ("POST", client(self.chat)),
            "/v1/completions": ("POST", client(self.completions)),
            "/inference/v1/generate": ("POST", client(self.generate)),
            "/tokenize": ("POST", client(self.tokenize)),
            "/detokenize": ("POST", client(self.detokenize)),
            "/pause": ("POST", admin(self.pause)),
            "/resume": ("POST", admin(self.resume)),
            "/update_weights": ("POST", admin(self.update_weights)),
            "/v1/load_lora_adapter": ("POST", admin(self.load_adapter)),
            "/v1/unload_lora_adapter": ("POST", admin(self.unload_adapter)),
        }
        app = Starlette(
            routes=[Route(path, answering(handler), methods=[method]) for path, (method, handler) in routes.items()],
            exception_handlers={HTTPException: on_http_error, Exception: on_bug},
        )
        return Measured(app, self.metrics, frozenset(routes))

    async def health(self, _: HttpRequest) -> Response:
        health = self.describe()
        return reply(health, 200 if health.status == "ok" else 503)

    def describe(self) -> Health:
        state = self.backend.state()
        return Health(
            status="ok" if state.failure is None else state.failure,
            version=str(state.version),
            model=self.model_name,
            running=state.running,
            waiting=state.waiting,
            paused=state.paused,
            capacity=state.capacity,
            max_model_len=self.backend.max_model_len,
            vocab_size=self.backend.vocab_size,
            engine=self.backend.name,
            kv_usage=state.kv_usage,
            preemptions=state.preemptions,
            stands_still=state.stands_still,
        )

    async def models(self, _: HttpRequest) -> Response:
        adapters = self.backend.state().adapters
        return reply({"object": "list", "data": [self._entry(None), *map(self._entry, adapters)]})

    async def model(self, http: HttpRequest) -> Response:
        return reply(self._entry(self._adapter(http.path_params["name"])))

    def _entry(self, adapter: str | None) -> dict[str, Any]:
        """What the list of models says of the model, or of an adapter of it."""
        return {
            "id": adapter or self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "max_model_len": self.backend.max_model_len,
            "parent": None if adapter is None else self.model_name,
        }

    async def show_metrics(self, _: HttpRequest) -> Response:
        text = self.metrics.text(self.backend.state(), self.model_name)
        return Response(text, 200, {**HEADERS, "Content-Type": CONTENT_TYPE})

    async def tokenize(self, http: HttpRequest) -> Response:
        async with self._body(http, _tokenize_decoder) as body:
            self._adapter(body.model)
            refuse_unsupported(body)
            if (body.prompt is None) == (body.messages is None):
                raise InvalidRequest("give either prompt, a text, or messages, a conversation")
            if body.messages is not None:
                asked = ChatRequest(
                    messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs
                )
                self._refuse_long(_said(body.messages), "messages", COUNTED_LENGTHS)
                tokens = await self._beside(http, lambda: self._chat.prompt(asked))
            else:
                text, special = body.prompt or "", body.add_special_tokens is not False
                self._refuse_long(text, "prompt", COUNTED_LENGTHS)
                tokens = await self._beside(http, lambda: self._chat.tokenizer.encode(text, add_special_tokens=special))
        return reply({"count": len(tokens), "max_model_len": self.backend.max_model_len, "tokens": tokens})

    async def detokenize(self, http: HttpRequest) -> Response:
        longest = COUNTED_LENGTHS * self.backend.max_model_len
        async with self._body(http, _detokenize_decoder, COUNTED_LENGTHS) as body:
            self._adapter(body.model)
            if len(body.tokens) > longest:
                raise InvalidRequest(
                    f"tokens: {len(body.tokens)} are more than {longest}, the most that are taken here"
                )

            def text() -> str:
                check_token_ids(body.tokens, self.backend.vocab_size, "tokens")
                return self._chat.tokenizer.decode(body.tokens)

            return reply({"prompt": await self._beside(http, text)})

    async def generate(self, http: HttpRequest) -> Response:
        body = await self._read(http, _generate_decoder)
        refuse_unsupported(body)
        params = body.sampling_params.checked()
        _refuse_long_name(body.request_id, "request_id")
        generations = self._submit(http, body.model, [(body.token_ids, params)], body.cache_salt, urgent=body.urgent)
        if body.stream:
            return EventStream(generate.streamed(body, self._news(generations), self.model_name), generations)
        [result] = await self._results(http, generations)
        return reply(generate.whole_response(body, result, self.model_name))

    async def chat(self, http: HttpRequest) -> Response:
        async with self._body(http, _chat_decoder) as body:
            params = self._chat.params(body)
            self._refuse_long(_said(body.messages), "messages")
            prompt = await self._beside(http, lambda: self._chat.prompt(body))
            check_prompt(prompt, self.backend.vocab_size, self.backend.max_model_len, "messages")
            body.messages = []  # the answer may take long, and needs them no more
        generations = self._submit(http, body.model, [(prompt, each) for each in params], body.cache_salt)
        if body.stream:
            events = chat_stream.streamed(self._chat, body, prompt, self._news(generations), len(generations))
            return EventStream(events, generations)
        return reply(self._chat.reply(body, prompt, await self._results(http, generations)))

    async def completions(self, http: HttpRequest) -> Response:
        async with self._body(http, _completion_decoder) as body:
            params = self._completions.params(body)
            prompts = await self._beside(http, lambda: self._prompts(body))
            if not body.echo:
                body.prompt = []
        asked = [(prompt, each) for prompt in prompts for each in params]
        generations = self._submit(http, body.model, asked, body.cache_salt)
        if body.stream:
            events = self._completions.stream(body, prompts, self._news(generations), len(generations))
            return EventStream(events, generations)
        return reply(self._completions.reply(body, prompts, await self._results(http, generations)))

    def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        """The tokens of each prompt of a completion, of which there may be very many."""
        for text in _texts(body.prompt):
            self._refuse_long(text, "prompt")
        prompts = self._completions.prompts(body)
        for prompt in prompts:
            check_prompt(prompt, self.backend.vocab_size, self.backend.max_model_len, "prompt")
        return prompts

    def _submit(
        self,
        http: HttpRequest,
        model: str | None,
        asked: Sequence[tuple[list[int], SamplingParams]],
        cache_salt: str | None,
        urgent: bool = False,
    ) -> list[Generation]:
        """All of them, or none."""
        adapter = self._adapter(model)
        session = http.headers.get(SESSION_HEADER)
        _refuse_long_name(cache_salt, "cache_salt")
        most = self.backend.state().max_requests if len(asked) > 1 else None
        if most is not None and len(asked) > most:
            raise InvalidRequest(
                f"n: {len(asked)} answers, n for each prompt, are more than the {most} that this server can hold, "
                "running and in line together: ask for fewer at once"
            )
        generations: list[Generation] = []
        try:
            for token_ids, params in asked:
                generations.append(
                    self.backend.submit(
                        token_ids, params, cache_salt=cache_salt, urgent=urgent, adapter=adapter, session=session
                    )
                )
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        return generations

    async def _results(self, http: HttpRequest, generations: Sequence[Generation]) -> list[GenerationResult]:
        """Wait for all; a client that hangs up, and one that fails, cancel the others."""

        async def wait() -> list[GenerationResult]:
            if len(generations) == 1:  # by far the most: spare them a task
                return [await generations[0].result()]
            return await asyncio.gather(*[generation.result() for generation in generations])

        try:
            return await unless_gone(http.receive, wait())
        finally:
            for generation in generations:
                generation.cancel()

    async def _news(
        self, generations: Sequence[Generation]
    ) -> AsyncIterator[tuple[int, TokenChunk | GenerationResult]]:
        """What comes of a streamed answer, with the time to its first token noted."""
        began: float | None = time.monotonic()
        async with contextlib.aclosing(news_of(generations)) as all_news:  # type: ignore[type-var]
            async for news in all_news:
                if began is not None:
                    self.metrics.first_token.observe(time.monotonic() - began)
                    began = None
                yield news

    async def pause(self, http: HttpRequest) -> Response:
        await self._read(http, _no_fields_decoder, if_empty=b"{}")
        await self.backend.pause()
        return reply(self.describe())

    async def resume(self, http: HttpRequest) -> Response:
        await self._read(http, _no_fields_decoder, if_empty=b"{}")
        await self.backend.resume()
        return reply(self.describe())

    async def update_weights(self, http: HttpRequest) -> Response:
        body = await self._read(http, _update_decoder)
        version = Version(body.incarnation, body.step)
        checksum = await self.backend.update_weights(_path(body.path, "path"), version)
        return reply(UpdateWeightsResponse(body.incarnation, body.step, checksum))

    async def load_adapter(self, http: HttpRequest) -> Response:
        body = await self._read(http, _adapter_decoder)
        if body.lora_name in self._names or not 0 < len(body.lora_name) <= LONGEST_NAME:
            raise InvalidRequest(f"lora_name must be a name of its own, of at most {LONGEST_NAME} characters")
        if body.lora_path is None:
            raise InvalidRequest("lora_path is missing")
        await self.backend.load_adapter(body.lora_name, _path(body.lora_path, "lora_path"))
        return reply({"id": body.lora_name, "parent": self.model_name})

    async def unload_adapter(self, http: HttpRequest) -> Response:
        body = await self._read(http, _adapter_decoder)
        await self.backend.unload_adapter(body.lora_name)
        return reply({"id": body.lora_name})

    def _for_clients(self, handler: Handler) -> Handler:
        async def checked(http: HttpRequest) -> Response:
            self._keys.check_client(http.headers.get("authorization"))
            return await handler(http)

        return checked

    def _for_admins(self, handler: Handler) -> Handler:
        async def checked(http: HttpRequest) -> Response:
            self._keys.check_admin(http.headers.get("authorization"))
            return await handler(http)

        return checked

    def _body(
        self, http: HttpRequest, decoder: msgspec.json.Decoder[T], lengths: int = 1, if_empty: bytes = b""
    ) -> AbstractAsyncContextManager[T]:
        """A body whose lists of token ids have at most so many times the longest sequence."""

        async def refuse_hopeless(content: bytearray) -> None:
            longest = self.backend.max_model_len
            bounds = (lengths * longest, OTHER_VALUES)
            if len(content) > OTHER_VALUES and await asyncio.to_thread(holds_more, content, *bounds):
                raise InvalidRequest(
                    f"the body holds more than a request here can be made of: lists of at most {bounds[0]} token ids "
                    f"(max_model_len = {longest}), and {OTHER_VALUES} other values"
                )

        return body_of(http, decoder, self._max_body, self._large_bodies, refuse_hopeless, if_empty)

    async def _read(self, http: HttpRequest, decoder: msgspec.json.Decoder[T], if_empty: bytes = b"") -> T:
        async with self._body(http, decoder, if_empty=if_empty) as body:
            return body

    async def _beside(self, http: HttpRequest, function: Callable[[], T]) -> T:
        """Work on the text of a request; a long one, or one of unknown length, holds up none but others like it."""
        size = http.headers.get("content-length", "")
        if size.isdecimal() and int(size) < LONG_BODY:
            return function()
        async with self._long_text:
            return await asyncio.to_thread(function)

    def _adapter(self, name: str | None) -> str | None:
        """Which adapter a request wants by naming a model; None for the model itself."""
        if name is None or name in self._names:
            return None
        if name in self.backend.state().adapters:
            return name
        raise ModelNotFound(f"model: {name!r} is not served here; {self.model_name!r} is")

    def _refuse_long(self, text: str, field: str, times: int = 1) -> None:
        """A text that is too long by far, more than so many times the longest, is not even made into tokens."""
        longest = self.backend.max_model_len
        if self._chat.tokenizer.min_tokens(text) > times * longest:
            raise InvalidRequest(
                f"{field}: a text of {len(text)} characters is longer than "
                f"{'' if times == 1 else f'{times} times '}max_model_len = {longest}"
            )


def _refuse_long_name(name: str | None, field: str) -> None:
    if name is not None and len(name) > LONGEST_NAME:
        raise InvalidRequest(f"{field} has {len(name)} characters: at most {LONGEST_NAME} are taken")


def _said(messages: list[dict[str, Any]]) -> str:
    """The texts of a conversation as one: many of them may be long together."""
    return "".join(text for message in messages for text in _texts(message.get("content")))


def _texts(content: Any) -> Iterator[str]:
    """The texts in a message's content or in a prompt."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _path(text: str, field: str) -> Path:
    if not text or "\0" in text:
        raise InvalidRequest(f"{field} is no path")
    return Path(text)
