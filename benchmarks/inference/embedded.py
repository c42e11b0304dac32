"""The embedded engine, as a contender."""

from __future__ import annotations

from pathlib import Path

from benchmarks.inference.loads import Job
from benchmarks.inference.worker import Seconds, Stopwatch

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import load_model
from headrace.inference.schema import SamplingParams


class Contender:
    def __init__(self, model: str, *, max_model_len: int) -> None:
        self._model = load_model(Path(model), "float32")
        self._max_model_len = max_model_len

    def run(self, jobs: list[Job], concurrent: int) -> Seconds:
        engine = Engine(self._model, max_model_len=self._max_model_len, max_running=concurrent)
        watch = Stopwatch()
        requests = [
            engine.submit(job.prompt, SamplingParams(max_tokens=job.completion, ignore_eos=True)) for job in jobs
        ]
        while engine.has_work:
            engine.step()
        seconds = watch.read()
        assert [len(request.logprobs) for request in requests] == [job.completion for job in jobs]
        return seconds
