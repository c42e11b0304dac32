"""vLLM behind our door: OpenAI's client, a death that is reported, and the demo, through real processes."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.errors import AGAIN
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.keys import Keys
from headrace.inference.schema import PROCESSED, SamplingParams
from headrace.inference.vllm.backend import VllmBackend
from headrace.observe.metrics import read_metrics
from headrace.rollout.version import Version
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import REPOSITORY, finish, headrace, is_alive, start, wait_until
from tests.inference.serving import chat_of, served
from tests.vllm.conftest import LONGEST, PYTHON

HELLO: Any = [{"role": "user", "content": "hello"}]


class Lent:
    """The shared backend, which the server that it is lent to does not close."""

    def __init__(self, backend: VllmBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def close(self) -> None:
        pass


def lent(backend: VllmBackend) -> Any:
    return Lent(backend)


@pytest.mark.asyncio(loop_scope="session")
async def test_openais_client_chats_with_it(backend: VllmBackend, model_directory: Path) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "n": 2, "seed": 5, "stop": ["zzz"]}
    async with (
        served(lent(backend), chat_of(model_directory), Keys(("secret",), ("admin",))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client,
    ):
        whole = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
        texts = ["", ""]
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(**asked, temperature=-1)
    assert texts == [choice.message.content for choice in whole.choices]
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3 and entry.logprob <= entry.top_logprobs[0].logprob


@pytest.mark.asyncio(loop_scope="session")
async def test_structured_outputs_are_those_of_vllm(backend: VllmBackend, model_directory: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 100, "n": 4, "seed": 5, "temperature": 1.5}
    async with (
        served(lent(backend), chat_of(model_directory), Keys()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        objects = await create(**asked, response_format=form, logprobs=True)
        choices = await create(**asked, extra_body={"guided_choice": ["yes", "no"]})
        matches = await create(**asked, extra_body={"structured_outputs": {"regex": "a{3}b"}})
        with pytest.raises(openai.BadRequestError):
            await create(**asked, extra_body={"guided_regex": "a("})
    for choice in objects.choices:
        if choice.finish_reason == "stop":  # a random model may write blanks until its limit
            assert json.loads(choice.message.content or "")["a"] in (1, 22)
        assert choice.logprobs_mode == PROCESSED  # type: ignore[attr-defined]
    assert {choice.message.content for choice in choices.choices} <= {"yes", "no"}
    assert {choice.message.content for choice in matches.choices} == {"aaab"}
    entries = objects.choices[0].logprobs.content  # type: ignore[union-attr]
    assert entries[0].logprob == pytest.approx(0, abs=1e-4)  # of the masked distribution: only "{" is allowed


@pytest.mark.asyncio(loop_scope="session")
async def test_the_orchestrators_client_samples_and_scores_with_it(backend: VllmBackend, model_directory: Path) -> None:
    async with served(lent(backend), chat_of(model_directory), Keys()) as url:
        client = EngineClient([url])
        try:
            done = await client.generate([5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True, logprobs=0))
            scores = await client.score([5, 6, 7, *done.token_ids])
            [health] = await client.health()
        finally:
            await client.close()
    assert scores.logprobs[3:] == pytest.approx(done.logprobs, abs=1e-5)
    versions = {Version.parse(span.version) for span in done.spans}
    assert versions == {backend.state().version} == {scores.version}
    assert (health.engine, health.max_model_len, health.capacity) == ("vllm", LONGEST, 8)


def children(pid: int) -> list[int]:
    """Of a process, and of those in turn."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in (line.split() for line in found.splitlines())}
    below = [pid]
    for process in below:
        below += [child for child, parent in parents.items() if parent == process]
    return below[1:]


@pytest.mark.timeout(300)
def test_a_server_whose_vllm_was_killed_logs_it_and_exits_for_a_restart(model_directory: Path) -> None:
    server = start(
        "serve", model_directory, "--engine", "vllm", "--vllm.python", PYTHON, "--port", "0",
        "--max_running", "4", env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert server.stdout is not None
    lines: list[str] = []
    while not (found := re.search(r"http://\S+:\d+", lines[-1] if lines else "")):
        lines.append(server.stdout.readline())
        assert lines[-1], "".join(lines)
    vllm = children(server.pid)
    assert vllm and found
    [front] = [pid for pid in vllm if is_front(pid)]
    for pid in children(front):
        os.kill(pid, signal.SIGKILL)
    code, output = finish(server, timeout=60)
    assert code == AGAIN, output
    assert re.search(r"the engine died: vLLM (was )?ended", output), output
    wait_until(lambda: not any(is_alive(pid) for pid in vllm), "vLLM's processes are gone", timeout=20)


def is_front(pid: int) -> bool:
    """Whether it is the child that we started, and not one of its own."""
    return "headrace.inference.vllm.child" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.timeout(600)
def test_the_demo_trains_on_what_vllm_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    sft = (REPOSITORY / "examples/reverse-text/sft.toml").read_text()
    (tmp_path / "sft.toml").write_text(sft.replace("max_steps = 600", "max_steps = 100"))
    run = RunDir(tmp_path / "run")
    code, output = headrace(
        "rl", "examples/reverse-text/rl.toml", "--output_dir", run.root, "--model.sft", tmp_path / "sft.toml",
        "--max_steps", 4, "--orchestrator.batch_size", 128, "--inference.engine", "vllm",
        "--inference.vllm.python", PYTHON, timeout=500,
    )  # fmt: skip
    assert code == 0, output
    summary = json.loads(headrace("summary", run.root, "--json")[1])
    assert summary["steps"] == 4
    assert summary["reward_end"] > 0.1
    records = list(read_metrics(run.metrics))
    drift = [record["drift/engine"] for record in records if "drift/engine" in record]
    assert drift and max(drift) < 1e-6
    assert headrace("audit", run.root)[0] == 0
