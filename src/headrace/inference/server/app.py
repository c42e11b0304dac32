"""The server's routes over one `Backend`: OpenAI's, vLLM's, admin calls, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headrace.config.inference import HttpConfig
from headrace.inference.backend import (
    AdminTimeout,
    Backend,
    Generation,
    GenerationResult,
    InvalidRequest,
    ModelNotFound,
    check_prompt,
    check_token_ids,
)
from headrace.inference.keys import Keys
from headrace.inference.schema import (
    SESSION_HEADER,
    Health,
    SamplingParams,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
)
from headrace.inference.server import completions, generate, responses
from headrace.inference.server.chat import Chat, ChatRequest
from headrace.inference.server.completions import CompletionRequest
from headrace.inference.server.generate import GenerateBody
from headrace.inference.server.metrics import Measured, Metrics
from headrace.inference.server.replies import (
    HEADERS,
    EventStream,
    Handler,
    answering,
    on_bug,
    on_http_error,
    reply,
    unless_gone,
)
from headrace.inference.server.request_bodies import (
    AdapterRequest,
    DetokenizeRequest,
    LargeBodies,
    NoFields,
    TokenizeRequest,
    decode_body,
    exceeds_json_limits,
    read_body,
    refuse_unsupported,
)
from headrace.inference.server.responses import ResponsesRequest
from headrace.inference.server.streaming import Updates, updates_of
from headrace.observe.prometheus import CONTENT_TYPE
from headrace.rollout.version import Version

T = TypeVar("T")

MAX_BODY = 32 << 20
LONG_BODY_BYTES = 1 << 16
"""Requests larger than this are tokenized in a thread, not on the event loop."""
MAX_OTHER_VALUES = 1 << 17
"""Strings, keys, lists and objects of a JSON request. Lists of token ids may be as long as a sequence."""
ADMIN_GRACE_S = 5.0
"""How much longer than `http.admin_timeout` the server waits for the engine, which limits its calls itself."""
MAX_NAME_CHARS = 256
"""Length of ids, salts and adapter names."""
TOKENIZE_LENGTHS = 16
"""Texts for /tokenize and /detokenize may be this many times max_model_len."""


class App:
    """The routes. `root` is the model's directory, which is another name of it, or its name on the hub.

    `max_body` is in bytes. `keys` may be replaced at any time.
    """

    def __init__(
        self,
        backend: Backend,
        chat: Chat,
        keys: Keys | None = None,
        *,
        root: str | None = None,
        max_body: int = MAX_BODY,
        limits: HttpConfig | None = None,
    ) -> None:
        self.backend = backend
        self.model_name = chat.model_name
        self.metrics = Metrics()
        self.keys = keys or Keys()
        self.limits = limits or HttpConfig()
        self._max_body = max_body
        self._large_bodies = LargeBodies()
        self._long_text = asyncio.Lock()
        self._chat = chat
        self._root = root or chat.model_name
        self._names = {self.model_name, Path(self.model_name).name, self._root}
        self._created = int(time.time())

    def asgi(self) -> ASGIApp:
        """Return the application: all routes, with the keys that each needs."""
        checks: dict[str, Callable[[str | None], None]] = {  # of the keys that are valid at that moment
            "client": lambda authorization: self.keys.check(authorization, admin=False),
            "admin": lambda authorization: self.keys.check(authorization, admin=True),
        }
        routes: dict[str, tuple[str, str, Handler]] = {
            "/health": ("GET", "anyone", self.health),
            "/v1/models": ("GET", "client", self.models),
            "/v1/models/{name:path}": ("GET", "client", self.model),
            "/metrics": ("GET", "client", self.show_metrics),
            "/v1/chat/completions": ("POST", "client", self.chat),
            "/v1/responses": ("POST", "client", self.responses),
            "/v1/completions": ("POST", "client", self.completions),
            "/inference/v1/generate": ("POST", "client", self.generate),
            "/tokenize": ("POST", "client", self.tokenize),
            "/detokenize": ("POST", "client", self.detokenize),
            "/pause": ("POST", "admin", partial(self._pause_or_resume, self.backend.pause)),
            "/resume": ("POST", "admin", partial(self._pause_or_resume, self.backend.resume)),
            "/update_weights": ("POST", "admin", self.update_weights),
            "/v1/load_lora_adapter": ("POST", "admin", self.load_adapter),
            "/v1/unload_lora_adapter": ("POST", "admin", self.unload_adapter),
        }
        app = Starlette(
            routes=[
                Route(path, answering(handler, checks.get(access)), methods=[method])
                for path, (method, access, handler) in routes.items()
            ],
            exception_handlers={HTTPException: on_http_error, Exception: on_bug},
        )
        app.router.redirect_slashes = False  # a redirect would lead to the name in `Host`
        return Measured(app, self.metrics, frozenset(routes))

    async def health(self, _: HttpRequest) -> Response:
        health = self.describe()
        return reply(health, 200 if health.status == "ok" else 503)

    def describe(self) -> Health:
        """Return the state of the engine as `/health` reports it."""
        state = self.backend.state()
        names = ("running", "waiting", "paused", "capacity", "kv_usage", "preemptions", "waits_for_trainer")
        return Health(
            status="ok" if state.failure is None else state.failure,
            version=str(state.version),
            model=self.model_name,
            max_model_len=self.backend.max_model_len,
            vocab_size=self.backend.vocab_size,
            engine=self.backend.name,
            root=self._root,
            **{name: getattr(state, name) for name in names},
        )

    async def models(self, _: HttpRequest) -> Response:
        adapters = self.backend.state().adapters
        return reply({"object": "list", "data": [self._entry(None), *map(self._entry, adapters)]})

    async def model(self, http: HttpRequest) -> Response:
        return reply(self._entry(self._adapter(http.path_params["name"])))

    def _entry(self, adapter: str | None) -> dict[str, Any]:
        """Return the entry of `/v1/models` for the model or an adapter."""
        return {
            "id": adapter or self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "root": self._root if adapter is None else adapter,
            "max_model_len": self.backend.max_model_len,
            "parent": None if adapter is None else self.model_name,
        }

    def metric_lines(self) -> Iterator[str]:
        """Yield the metrics of engine and server, from any thread."""
        return self.metrics.lines(self.backend.state(), self.model_name)

    async def show_metrics(self, _: HttpRequest) -> Response:
        return Response("\n".join([*self.metric_lines(), ""]), 200, {**HEADERS, "Content-Type": CONTENT_TYPE})

    async def tokenize(self, http: HttpRequest) -> Response:
        async with self._body(http, TokenizeRequest) as body:
            self._adapter(body.model)
            refuse_unsupported(body)
            if (body.prompt is None) == (body.messages is None):
                raise InvalidRequest("set either this text or messages, a conversation", key="prompt")
            if body.messages is not None:
                chat_request = ChatRequest(
                    messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs
                )
                self._refuse_long(_joined_text(body.messages), "messages", TOKENIZE_LENGTHS)
                tokens = await self._run_text_work(http, lambda: self._chat.prompt(chat_request))
            else:
                text, special = body.prompt or "", body.add_special_tokens is not False
                self._refuse_long(text, "prompt", TOKENIZE_LENGTHS)
                tokens = await self._run_text_work(
                    http, lambda: self._chat.tokenizer.encode(text, add_special_tokens=special)
                )
        return reply({"count": len(tokens), "max_model_len": self.backend.max_model_len, "tokens": tokens})

    async def detokenize(self, http: HttpRequest) -> Response:
        longest = TOKENIZE_LENGTHS * self.backend.max_model_len
        async with self._body(http, DetokenizeRequest, TOKENIZE_LENGTHS) as body:
            self._adapter(body.model)
            if len(body.tokens) > longest:
                raise InvalidRequest(f"{len(body.tokens)} ids are more than the limit of {longest}", key="tokens")

            def text() -> str:
                check_token_ids(body.tokens, self.backend.vocab_size, "tokens")
                return self._chat.tokenizer.decode(body.tokens)

            return reply({"prompt": await self._run_text_work(http, text)})

    async def generate(self, http: HttpRequest) -> Response:
        body = await self._read(http, GenerateBody)
        refuse_unsupported(body)
        if body.flat_logprobs and (body.stream or body.sampling_params.logprobs != 0):
            raise InvalidRequest("only for sampling_params.logprobs = 0, and not for streams", key="flat_logprobs")
        params = body.sampling_params.engine_params()
        _refuse_long_name(body.request_id, "request_id")
        generations = self._submit(http, body.model, [(body.token_ids, params)], body.cache_salt, urgent=body.urgent)
        if body.stream:
            return EventStream(generate.stream(body, self._updates(generations), self.model_name), generations)
        [result] = await self._results(http, generations)
        return reply(generate.reply(body, result, self.model_name))

    async def chat(self, http: HttpRequest) -> Response:
        async with self._body(http, ChatRequest) as body:
            prompt, params = await self._render(http, body)
        generations = self._submit(http, body.model, [(prompt, each) for each in params], body.cache_salt)
        if body.stream:
            events = self._chat.stream(body, prompt, self._updates(generations), len(generations))
            return EventStream(events, generations)
        return reply(self._chat.reply(body, prompt, await self._results(http, generations)))

    async def responses(self, http: HttpRequest) -> Response:
        async with self._body(http, ResponsesRequest) as body:
            chat_body = body.chat_request()
            prompt, params = await self._render(http, chat_body, "input")
            body.input = []
        generations = self._submit(http, body.model, [(prompt, each) for each in params], body.cache_salt)
        if body.stream:
            events = responses.stream(self._chat, body, chat_body, prompt, self._updates(generations))
            return EventStream(events, generations)
        [result] = await self._results(http, generations)
        return reply(responses.reply(self._chat, body, chat_body, prompt, result))

    async def _render(
        self, http: HttpRequest, body: ChatRequest, field: str = "messages"
    ) -> tuple[list[int], list[SamplingParams]]:
        """Return the prompt of a chat and the parameters of its choices; `field` has its messages in the request."""
        params = self._chat.params(body)
        self._refuse_long(_joined_text(body.messages), field)
        prompt = await self._run_text_work(http, lambda: self._chat.prompt(body))
        check_prompt(prompt, self.backend.vocab_size, self.backend.max_model_len, field)
        body.messages = []  # free the memory: the reply does not need them
        return prompt, params

    async def completions(self, http: HttpRequest) -> Response:
        async with self._body(http, CompletionRequest) as body:
            params = body.choice_params()
            prompts = await self._run_text_work(http, lambda: self._prompts(body))
            if not body.echo:
                body.prompt = []
        requests = [(prompt, each) for prompt in prompts for each in params]
        generations = self._submit(http, body.model, requests, body.cache_salt)
        if body.stream:
            events = completions.stream(self._chat, body, prompts, self._updates(generations), len(generations))
            return EventStream(events, generations)
        return reply(completions.reply(self._chat, body, prompts, await self._results(http, generations)))

    def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Return the token ids of each prompt of a completion."""
        for text in _texts(body.prompt):
            self._refuse_long(text, "prompt")
        prompts = body.prompt_ids(self._chat.tokenizer)
        for prompt in prompts:
            check_prompt(prompt, self.backend.vocab_size, self.backend.max_model_len, "prompt")
        return prompts

    def _submit(
        self,
        http: HttpRequest,
        model: str | None,
        requests: Sequence[tuple[list[int], SamplingParams]],
        cache_salt: str | None,
        urgent: bool = False,
    ) -> list[Generation]:
        """Submit all requests, or none if one is refused."""
        adapter = self._adapter(model)
        session = http.headers.get(SESSION_HEADER)
        _refuse_long_name(cache_salt, "cache_salt")
        limit = self.backend.state().max_requests if len(requests) > 1 else None
        if limit is not None and len(requests) > limit:
            raise InvalidRequest(
                f"{len(requests)} completions, n for each prompt, are more than this server's limit of {limit} running "
                "and waiting requests",
                key="n",
            )
        generations: list[Generation] = []
        try:
            for token_ids, params in requests:
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
        """Wait for all results; a disconnect or a failure cancels the other requests."""

        async def wait() -> list[GenerationResult]:
            if len(generations) == 1:  # the common case, without an extra task
                return [await generations[0].result()]
            return await asyncio.gather(*[generation.result() for generation in generations])

        try:
            return await unless_gone(http.receive, wait())
        finally:
            for generation in generations:
                generation.cancel()

    def _updates(self, generations: Sequence[Generation]) -> Updates:
        return updates_of(generations, self.metrics.first_token.observe)

    async def _pause_or_resume(self, call: Callable[[], Coroutine[Any, Any, None]], http: HttpRequest) -> Response:
        """Pause or resume the engine."""
        await self._read(http, NoFields, if_empty=b"{}")
        await self._admin_call(call(), "the engine")
        return reply(self.describe())

    async def update_weights(self, http: HttpRequest) -> Response:
        body = await self._read(http, UpdateWeightsRequest)
        version = Version(body.incarnation, body.step)
        path = _parse_path(body.path, "path")
        checksum = await self._admin_call(self.backend.update_weights(path, version), path)
        return reply(UpdateWeightsResponse(body.incarnation, body.step, checksum))

    async def load_adapter(self, http: HttpRequest) -> Response:
        body = await self._read(http, AdapterRequest)
        if body.lora_name in self._names or not 0 < len(body.lora_name) <= MAX_NAME_CHARS:
            fact = f"must have 1 to {MAX_NAME_CHARS} characters and not be the model's name"
            raise InvalidRequest(fact, key="lora_name", value=body.lora_name)
        if body.lora_path is None:
            raise InvalidRequest("missing", key="lora_path")
        path = _parse_path(body.lora_path, "lora_path")
        await self._admin_call(self.backend.load_adapter(body.lora_name, path), path)
        return reply({"id": body.lora_name, "parent": self.model_name})

    async def unload_adapter(self, http: HttpRequest) -> Response:
        body = await self._read(http, AdapterRequest)
        await self._admin_call(self.backend.unload_adapter(body.lora_name), body.lora_name)
        return reply({"id": body.lora_name})

    async def _admin_call(self, call: Coroutine[Any, Any, T], subject: Path | str) -> T:
        """Wait for a call; raises `AdminTimeout`, with what the call waits for, if the engine's own limits fail."""
        limit = self.limits.admin_timeout + ADMIN_GRACE_S
        try:
            async with asyncio.timeout(limit):
                return await call
        except TimeoutError as error:
            raise AdminTimeout(f"{subject}: no result within {limit:g} s (http.admin_timeout)") from error

    @contextlib.asynccontextmanager
    async def _body(
        self, http: HttpRequest, kind: type[T], lengths: int = 1, if_empty: bytes = b""
    ) -> AsyncIterator[T]:
        """Read and decode a body whose lists of token ids have at most `lengths` times max_model_len entries."""
        async with read_body(http, self._max_body, self._large_bodies, self.limits.body_timeout) as content:
            longest = self.backend.max_model_len
            bounds = (lengths * longest, MAX_OTHER_VALUES)
            if len(content) > MAX_OTHER_VALUES and await asyncio.to_thread(exceeds_json_limits, content, *bounds):
                raise InvalidRequest(
                    f"the body has too many values: lists are limited to {bounds[0]} token ids "
                    f"(max_model_len = {longest}), other values to {MAX_OTHER_VALUES}"
                )
            yield decode_body(content or if_empty, kind)

    async def _read(self, http: HttpRequest, kind: type[T], if_empty: bytes = b"") -> T:
        async with self._body(http, kind, if_empty=if_empty) as body:
            return body

    async def _run_text_work(self, http: HttpRequest, function: Callable[[], T]) -> T:
        """Run work on a request's text, in a thread and one at a time if the request is long or of unknown length."""
        size = http.headers.get("content-length", "")
        if size.isdecimal() and int(size) < LONG_BODY_BYTES:
            return function()
        async with self._long_text:
            return await asyncio.to_thread(function)

    def _adapter(self, name: str | None) -> str | None:
        """Return the adapter that a model name refers to; None for the model itself. Raises `ModelNotFound`."""
        if name is None or name in self._names:
            return None
        if name in self.backend.state().adapters:
            return name
        raise ModelNotFound(f"model: {name!r} is not served here; {self.model_name!r} is")

    def _refuse_long(self, text: str, field: str, times: int = 1) -> None:
        """Raise `InvalidRequest` for a text that has more than `times` max_model_len tokens, without tokenizing it."""
        longest = self.backend.max_model_len
        if self._chat.tokenizer.min_tokens(text) > times * longest:
            raise InvalidRequest(
                f"a text of {len(text)} characters is longer than "
                f"{'' if times == 1 else f'{times} times '}max_model_len = {longest}",
                key=field,
            )


def _refuse_long_name(name: str | None, field: str) -> None:
    if name is not None and len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{len(name)} characters are more than the limit of {MAX_NAME_CHARS}", key=field)


def _joined_text(messages: list[dict[str, Any]]) -> str:
    """Return all texts of a conversation as one."""
    return "".join(text for message in messages for text in _texts(message.get("content")))


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a message's content or of a prompt."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _parse_path(text: str, field: str) -> Path:
    if not text or "\0" in text:
        raise InvalidRequest("not a path", key=field, value=text)
    return Path(text)
