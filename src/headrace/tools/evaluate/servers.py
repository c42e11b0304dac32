"""Servers of evaluated models: endpoints that are running already, or engines that are started on this machine.

Models take turns on sets of engines. A set is one engine if there are more models than engines, and several engines
that share a model's episodes otherwise.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.base import Tree
from headrace.config.inference import InferenceConfig
from headrace.environments.base import Reply
from headrace.environments.openai_chat import chat, is_context_overflow
from headrace.errors import BadInput, Failure
from headrace.inference.client.openai_client import ChatResponse, OpenAIClient, OpenAIError
from headrace.inference.client.served_model import ServedModel, sampling_keys, structured_keys
from headrace.inference.schema import StructuredOutputs
from headrace.launch.processes import gpu_env, thread_env
from headrace.launch.server_target import PrivateServer, base_url, key_in
from headrace.machine import free_memory, usable_cores, visible_gpus
from headrace.orchestrator.conversation import derive_seed
from headrace.rollout.types import Message
from headrace.runfile.reading import parse_overrides, put, validate
from headrace.tools.evaluate.candidates import Candidate

CORES_PER_ENGINE = 2
MEMORY_PER_ENGINE_BYTES = 2 << 30
"""Memory of an engine with a small model and without a GPU."""

EngineSet = Sequence[Mapping[str, str]]
"""Engines that serve one model at a time: the environment variables of each engine's process."""


class Machine(NamedTuple):
    """The resources of a machine that engines and runs share."""

    gpus: Sequence[str]
    cores: int
    memory: int
    """Free bytes."""

    @classmethod
    def local(cls) -> Machine:
        return cls(visible_gpus(), usable_cores(), free_memory())


def gpus_per_engine(serve_options: Sequence[str]) -> int:
    """Return the number of GPUs of a server with these options of `headrace serve`; raises on invalid options."""
    tree: Tree = {}
    for key, value in parse_overrides(serve_options):
        put(tree, key, value)
    config, _ = validate(InferenceConfig, tree, "--serve-args")
    return config.gpus_per_server


def plan_engine_sets(machine: Machine, wanted: int | None, gpus_each: int, models: int) -> list[EngineSet]:
    """Return the sets of engines on which `models` take turns, with `wanted` engines in total.

    If `wanted` is None: one engine per `gpus_each` GPUs; without GPUs one per model, as far as there are 2 cores and
    2 GiB of free memory for each.
    """
    sets = [machine.gpus[first : first + gpus_each] for first in range(0, len(machine.gpus), gpus_each)]
    sets = [gpus for gpus in sets if len(gpus) == gpus_each]
    if machine.gpus and (wanted or 1) > len(sets):
        fact = f"an engine needs {gpus_each} GPUs, and {len(machine.gpus)} are visible"
        fix = f"Set at most {len(sets)}." if sets else "Lower the parallel sizes in --serve-args."
        raise BadInput(fact, key="--engines", value=wanted, fix=fix)
    capacity = min(models, machine.cores // CORES_PER_ENGINE, machine.memory // MEMORY_PER_ENGINE_BYTES)
    count = max(1, wanted or len(sets) or capacity)
    share = thread_env(max(1, machine.cores // count)) if count > 1 else {}
    engines = [{**share, **(gpu_env(sets[number]) if sets else {})} for number in range(count)]
    each = max(1, count // max(1, models))
    return [engines[first : first + each] for first in range(0, count - each + 1, each)]


POLL_INTERVAL_S = 0.1


class ServedModelUrls(NamedTuple):
    """The addresses of a model, its API key, and the directory of its tokenizer (None: the server's model name)."""

    urls: list[str]
    key: str | None
    directory: str | None
    chat_urls: Sequence[str] = ()
    """Base URLs of the OpenAI interface; empty for engines that were started here."""
    key_var: str = ""
    """The environment variable of the key."""


class ExportFailed(Failure):
    """`headrace export` failed; the message has its output."""


@asynccontextmanager
async def serving(
    candidate: Candidate, options: Sequence[str], key_var: str, log: Path, engines: EngineSet
) -> AsyncIterator[ServedModelUrls]:
    """Serve a model on these engines with these options of `headrace serve`; their logs are kept.

    An endpoint needs no engines; `key_var` is the environment variable of its key.
    """
    if candidate.kind == "endpoint":
        chat_urls = [base_url(url) for url in candidate.source.split(",")]
        yield ServedModelUrls(engine_urls(candidate), key_in(key_var), None, chat_urls, key_var)
    elif candidate.kind == "model":
        _check_final_model(candidate)
        async with _start_engines(candidate.source, options, log, engines) as served:
            yield served
    else:
        with tempfile.TemporaryDirectory(prefix="model-", dir=log.parent) as directory:
            await _export(candidate.source, directory)
            async with _start_engines(directory, options, log, engines) as served:
                yield served


def engine_urls(endpoint: Candidate) -> list[str]:
    return [base_url(url).removesuffix("/v1") for url in endpoint.source.split(",")]


def _check_final_model(candidate: Candidate) -> None:
    if candidate.run is not None and not Path(candidate.source).is_dir():
        fix = "Finish the run, use --checkpoints permanent, or export a checkpoint (headrace export)."
        raise BadInput("the run has no final model", key="CHECKPOINT", value=str(candidate.run), fix=fix)


async def _export(checkpoint: str, directory: str) -> None:
    """Export a checkpoint in another process: it needs torch and as much memory as the model."""
    argv = [sys.executable, "-m", "headrace", "export", checkpoint, directory]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise ExportFailed(f"{checkpoint} cannot be exported: {output.decode(errors='replace').strip()[-2000:]}")


@asynccontextmanager
async def _start_engines(
    model: str, options: Sequence[str], log: Path, engines: EngineSet
) -> AsyncIterator[ServedModelUrls]:
    """Start a server per engine, with the same key. The second logs to `serve-2.log`."""
    key = secrets.token_urlsafe()
    servers: list[PrivateServer] = []
    try:
        for number, env in enumerate(engines, 1):
            own_log = log if number == 1 else log.with_stem(f"{log.stem}-{number}")
            servers.append(PrivateServer(model, options, own_log, env, key))
        while None in (addresses := [server.address() for server in servers]):
            await asyncio.sleep(POLL_INTERVAL_S)
        yield ServedModelUrls([address.removesuffix("/v1") for address in addresses if address], key, model)
    finally:
        await asyncio.gather(*(asyncio.to_thread(server.close) for server in servers))


FAILED = "endpoint"
"""Reason of an episode whose request failed."""


async def find_model(urls: Sequence[str], api_key_var: str, wanted: str | None, retry_for: float) -> str:
    """Return `wanted`, or the name of the only model of the servers."""
    if wanted is not None:
        return wanted
    probe = ServedModel("", urls, api_key_var=api_key_var, retry_for=retry_for)
    try:
        names = [model.id for model in await probe.retry(probe.clients[0].models)]
    except OpenAIError as error:
        address = probe.clients[0].address
        fact = f"the server has neither the Headrace API nor the OpenAI API: {error}"
        raise BadInput(fact, key="CHECKPOINT", value=address) from error
    finally:
        await probe.close()
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        fact = f"{urls[0]} has {len(names)} models ({listed})"
        raise BadInput(fact, key="--endpoint-model", fix="Set --endpoint-model NAME.")
    return names[0]


class TextContexts:
    """Makes the contexts of episodes, and counts the tokens of their replies as the servers report them."""

    def __init__(self, model: ServedModel, sampling: Mapping[str, Any], seed: int | None) -> None:
        self.model = model
        self.max_tokens: int | None = sampling.get("max_tokens")
        self.keys = sampling_keys(**{key: value for key, value in sampling.items() if key != "max_tokens"})
        self.seed = seed
        self.tokens: dict[str, int | None] = {}
        """By episode name; None if a reply had no usage."""

    def open(self, session: str, episode: str) -> _Context:
        self.tokens[episode] = 0
        return _Context(self, episode)

    def close(self, session: str) -> None:
        """Sessions hold no resources."""


class _Context:
    """The context of one episode."""

    def __init__(self, contexts: TextContexts, episode: str) -> None:
        self._contexts = contexts
        self._episode = episode
        self._requests = 0

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        self._requests += 1
        seed = self._contexts.seed
        own = {} if seed is None else {"seed": derive_seed(f"{seed}-{self._episode}-{self._requests}")}
        limits = [limit for limit in (self._contexts.max_tokens, max_tokens) if limit is not None]
        extra = {**self._contexts.keys, **own, **structured_keys(structured_outputs)}
        request = partial(self._request, list(tools), extra, min(limits, default=None))
        return await chat(request, messages, tools, FAILED)

    async def _request(
        self, tools: list[dict[str, Any]], extra: dict[str, Any], limit: int | None, messages: list[Message]
    ) -> ChatResponse:
        async def send(max_tokens: int | None, client: OpenAIClient) -> ChatResponse:
            return await client.chat(messages, tools=tools, max_tokens=max_tokens, extra=extra)

        try:
            response = await self._contexts.model.call(partial(send, limit))
        except OpenAIError as error:
            if limit is None or not is_context_overflow(error):
                raise
            # Many servers reject a limit above the remaining context: retry without a limit.
            response = await self._contexts.model.call(partial(send, None))
        total, tokens = self._contexts.tokens[self._episode], response.usage.completion_tokens
        # A server without usage reports 0.
        self._contexts.tokens[self._episode] = total + tokens if total is not None and tokens else None
        return response
