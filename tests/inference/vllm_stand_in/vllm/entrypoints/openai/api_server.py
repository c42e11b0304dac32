"""Stands in for vLLM's server: its routes, and a policy that says 10, 11, 12, ... without end.

Run like the real one, by module name, with `--uds`. What it shall be comes from the environment: OLD=1 is a version
without stamps, TRUNCATES=1 one that reports the logprobs of what was left, FAILS=1 one that does not start, SLOW=CALL
one that takes a while for a route or a call of the workers, BREAKS=CALL one that does it, and then says that it failed,
FETCHES=0 one whose fetches never end, and GARBLES=N one whose first metrics are nonsense. Prompts in ODD are answered
with what no vLLM should say. It writes what it is asked to the file REQUESTS.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

OLD = os.environ.get("OLD") == "1"
TRUNCATES = os.environ.get("TRUNCATES") == "1"
BREAKS = os.environ.get("BREAKS")
SLOW = os.environ.get("SLOW")
FETCHES = os.environ.get("FETCHES") != "0"
ODD = {
    21: "no JSON",
    22: {"choices": []},
    23: {"choices": [{"token_ids": [1], "finish_reason": "length", "weight_versions": [{"version": "x"}]}]},
}
Call = Callable[[Request], Awaitable[Response]]
STEP = 0.005
SLOWNESS = 0.15
going = asyncio.Event()
going.set()
version = "default"
counts: dict[str, int] = {}
moved_aside: set[str] = set()
preemptions = 2
garbled = int(os.environ.get("GARBLES", "0"))
models = {"policy"}
METRICS = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{{engine="0",model_name="policy"}} {running}
vllm:kv_cache_usage_perc{{engine="0",model_name="policy"}} 0.25
vllm:request_success_total{{engine="0",finished_reason="abort",model_name="policy"}} 3.0
vllm:num_preemptions_total{{engine="0",model_name="policy"}} {preemptions}
"""


def logprob(body: dict[str, Any]) -> float:
    """Of every token: .5 among all, 1 where it is the only one left and that is what is reported."""
    params = body["sampling_params"]
    return 0.0 if TRUNCATES and (params["top_k"] or params["min_p"]) else -0.7


def entry(token: int, body: dict[str, Any]) -> dict[str, Any]:
    said = {"token": f"token_id:{token}"} if OLD else {"token_id": token}
    said["logprob"] = logprob(body)
    return {**said, "top_logprobs": [dict(said)]}


async def sampled(body: dict[str, Any]) -> AsyncIterator[tuple[int, str]]:
    """Tokens one after the other, each with the version that sampled it."""
    global preemptions
    name = f"generate-tokens-{body['request_id']}-0123abcd"
    counts[name] = 0
    try:
        for n in range(body["sampling_params"]["max_tokens"]):
            await asyncio.sleep(STEP)
            await going.wait()
            counts[name] = n + 1
            preemptions += name in moved_aside  # vLLM, too, counts only now that it goes on
            moved_aside.discard(name)
            yield 10 + n % 200, version
            if 10 + n % 200 in body["sampling_params"]["stop_token_ids"]:
                return
    finally:
        counts.pop(name)


def choice(tokens: list[int], body: dict[str, Any], reason: str | None, versions: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"index": 0, "token_ids": tokens, "finish_reason": reason, "logprobs": None}
    if body["sampling_params"].get("logprobs") is not None:
        found["logprobs"] = {"content": [entry(token, body) for token in tokens]}
    if reason and not OLD:
        starts = [n for n, name in enumerate(versions) if n == 0 or name != versions[n - 1]]
        ends = [*starts[1:], len(versions)]
        found["weight_versions"] = [
            {"version": versions[start], "start": start, "end": end} for start, end in zip(starts, ends, strict=True)
        ]
    return found


async def generate(request: Request) -> Response:
    body = await request.json()
    note({"route": "generate", "rank": request.headers.get("X-data-parallel-rank"), **body})
    if body["token_ids"] == [13]:
        return JSONResponse({"error": {"message": "it has the number 13", "code": 500}}, 500)
    if body["model"] not in models:
        return JSONResponse({"error": {"message": f"The model {body['model']} does not exist", "code": 404}}, 404)
    if body["token_ids"][0] in ODD:
        return odd(ODD[body["token_ids"][0]], body["stream"])
    limit = body["sampling_params"]["max_tokens"]

    async def stream() -> AsyncIterator[str]:
        versions: list[str] = []
        async for token, sampler in sampled(body):
            versions.append(sampler)
            reason = "length" if len(versions) == limit else None
            yield f"data: {json.dumps({'choices': [choice([token], body, reason, versions)]})}\n\n"
        yield "data: " + json.dumps({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 4}}}) + "\n\n"
        yield "data: [DONE]\n\n"

    if body["stream"]:
        return StreamingResponse(stream(), media_type="text/event-stream")
    tokens, versions = [], []
    async for token, sampler in sampled(body):
        tokens.append(token)
        versions.append(sampler)
    reason = "length" if len(tokens) == limit else "stop"
    return JSONResponse({"choices": [choice(tokens, body, reason, versions)]})


def odd(said: Any, stream: bool) -> Response:
    text = said if isinstance(said, str) else json.dumps(said)
    return Response(f"data: {text}\n\n", media_type="text/event-stream") if stream else Response(text)


async def pause(request: Request) -> Response:
    note({"route": "pause", **request.query_params})
    going.clear()
    if request.query_params["clear_cache"] == "true":
        moved_aside.update(counts)
    return JSONResponse({})


async def resume(request: Request) -> Response:
    note({"route": "resume"})
    going.set()
    return JSONResponse({})


async def collective_rpc(request: Request) -> Response:
    body = await request.json()
    note({"route": body["method"], "args": body["args"]})
    if body["method"] == SLOW:
        await asyncio.sleep(SLOWNESS)
    if body["method"] == BREAKS:
        return broken()
    results: dict[str, Any] = {
        "report_untruncated_logprobs": "True",
        "count_tokens": None,
        "sampled_tokens": {"counts": counts, "ended": []},
        "fetch_published": None,
        "has_published": {"done": FETCHES, "problem": None},
        "await_published": None,
    }
    if body["method"] == "load_published":
        marker = json.loads((Path(body["args"][0]) / "COMPLETE.json").read_text())
        return JSONResponse({"results": [marker["checksum"]]})
    return JSONResponse({"results": [results[body["method"]]]})


async def update_weight_version(request: Request) -> Response:
    global version
    version = (await request.json())["new_version"]
    return JSONResponse({})


async def load_adapter(request: Request) -> Response:
    body = await request.json()
    note({"route": "load_adapter", **body})
    if not (Path(body["lora_path"]) / "adapter_model.safetensors").exists():
        return JSONResponse({"error": {"message": "no tensors"}}, 400)
    models.add(body["lora_name"])
    return PlainTextResponse("Success")


async def unload_adapter(request: Request) -> Response:
    body = await request.json()
    note({"route": "unload_adapter", **body})
    models.remove(body["lora_name"])
    return PlainTextResponse("Success")


async def metrics(request: Request) -> Response:
    global garbled
    garbled -= 1
    running = "nan" if garbled >= 0 else len(counts)
    return PlainTextResponse(METRICS.format(running=running, preemptions=preemptions))


async def health(request: Request) -> Response:
    return Response()


async def unknown(request: Request) -> Response:
    return JSONResponse({"detail": "Not Found"}, 404)


def broken() -> Response:
    return JSONResponse({"error": {"message": f"{BREAKS} is broken"}}, 500)


def slow_or_broken(function: Call) -> Call:
    """Wrap a handler: slow where `SLOW` names it, a 500 where `BREAKS` does."""

    async def call(request: Request) -> Response:
        response = await function(request)
        if function.__name__ == SLOW:
            await asyncio.sleep(SLOWNESS)
        return broken() if function.__name__ == BREAKS else response

    return call


def note(asked: dict[str, Any]) -> None:
    with open(os.environ["REQUESTS"], "a") as file:
        print(json.dumps(asked), file=file)


def main() -> None:
    if os.environ.get("FAILS"):
        print("a line of its log")
        sys.exit(3)
    posts: dict[str, Call] = {
        "/inference/v1/generate": generate,
        "/pause": pause,
        "/resume": resume,
        "/collective_rpc": collective_rpc,
        "/v1/load_lora_adapter": load_adapter,
        "/v1/unload_lora_adapter": unload_adapter,
    }
    posts["/update_weight_version"] = unknown if OLD else update_weight_version
    routes = [Route(path, slow_or_broken(function), methods=["POST"]) for path, function in posts.items()]
    routes += [Route("/metrics", metrics), Route("/health", health)]
    socket = sys.argv[sys.argv.index("--uds") + 1]
    print("its arguments:", *sys.argv[1:])
    uvicorn.run(Starlette(routes=routes), uds=socket, log_level="warning", timeout_graceful_shutdown=0)


if __name__ == "__main__":
    main()
