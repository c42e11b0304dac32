"""The embedded engine on a GPU, as a contender: built as `headrace serve` builds it, with no server in front."""

from __future__ import annotations

from pathlib import Path

from benchmarks.inference.loads import Job
from benchmarks.inference.worker import Seconds, Stopwatch

from headrace.config.inference import InferenceConfig
from headrace.config.model import ModelConfig
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import load_engine
from headrace.inference.schema import SamplingParams
from headrace.text.tokenizer import Tokenizer


class Contender:
    """The engine is made when it is first asked, so that processes can import beside each other."""

    def __init__(
        self, model: str, *, max_model_len: int, concurrent: int, step_tokens: int | None, kv_bytes: int
    ) -> None:
        self._directory = Path(model)
        self._config = InferenceConfig(
            model=ModelConfig(name=model),
            max_model_len=max_model_len,
            max_running=concurrent,
            max_step_tokens=step_tokens,
            kv_cache_gb=kv_bytes / 1e9,
            prefix_cache=False,
        )
        self._engine: Engine | None = None

    def run(self, jobs: list[Job], concurrent: int) -> Seconds:
        watch = Stopwatch()
        if self._engine is None:
            self._engine = load_engine(self._config, self._directory, Tokenizer(self._directory))
        requests = [
            self._engine.submit(job.prompt, SamplingParams(max_tokens=job.completion, ignore_eos=True)) for job in jobs
        ]
        while self._engine.has_work:
            self._engine.step()
        results = [request.future.result() for request in requests]
        seconds = watch.read()
        assert [len(result.logprobs) for result in results] == [job.completion for job in jobs]
        return seconds
