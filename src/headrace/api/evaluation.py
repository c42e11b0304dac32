"""Evaluate models on an environment from Python, as `headrace eval` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.api.model import blocking
from headrace.api.run import Run
from headrace.launch.own_code import add_code_folders_of
from headrace.launch.process import set_variables
from headrace.launch.saved_config import evaluation_directory, read_run
from headrace.observe.console import SafeConsole
from headrace.tools.evaluate import evaluation as evaluating
from headrace.tools.evaluate.candidates import Candidate, find_models, run_environment
from headrace.tools.evaluate.episodes import Evaluation
from headrace.tools.evaluate.report import show_progress
from headrace.tools.evaluate.results import ModelResult
from headrace.transport.run_dir import RunDir

Evaluated = str | os.PathLike[str] | Run


def evaluate(
    models: Evaluated | Sequence[Evaluated],
    env: str = "",
    *,
    env_args: Mapping[str, Any] | None = None,
    output: Path | None = None,
    permanent: bool = False,
    temperature: float = 0.0,
    max_tokens: int | None = None,
    **settings: Any,
) -> list[ModelResult]:
    """Return the scores, lengths and failures of models, runs, checkpoints or servers on an environment.

    Without `env` it is the environment of the run. `permanent`: the permanent checkpoints of a run, not its final
    model. Further settings are those of `Evaluation`: `samples`, `num_examples`, `seed`, ... An evaluation that was
    stopped continues from its `output`.
    """
    several = [models] if isinstance(models, str | os.PathLike | Run) else models
    names = [str(model.path) if isinstance(model, Run) else os.fspath(model) for model in several]
    sampling = {"temperature": temperature, **({} if max_tokens is None else {"max_tokens": max_tokens})}
    asked = Evaluation(output or Path(), env, dict(env_args or {}), sampling, **settings)
    evaluation, candidates, _ = complete(asked, names, permanent=permanent)
    with show_progress(SafeConsole(stderr=True)) as progress:
        outcomes = blocking(evaluating.evaluate(evaluation, candidates, progress))
    return [outcome.result for outcome in outcomes]


def complete(
    evaluation: Evaluation, models: Sequence[str], *, permanent: bool
) -> tuple[Evaluation, list[Candidate], str]:
    """Fill in the environment of the models' run and the output directory; returns the models and a name, too."""
    candidates = find_models(models, permanent=permanent)
    subject = evaluation.env
    if not evaluation.env:
        own = run_environment(candidates)
        evaluation = evaluation._replace(env=own.id, args=own.args | evaluation.args)
        subject = own.name
        print(f"on {own.name}, as {own.run} has it", file=sys.stderr)
    runs = list(dict.fromkeys(candidate.run for candidate in candidates if candidate.run is not None))
    for run in runs:
        add_code_folders_of(RunDir(run))  # the environment may be the run's own code
    if runs:
        set_variables(read_run(runs[0]).launch)  # locations of its data, above all HF_HOME
    if evaluation.output == Path():
        evaluation = evaluation._replace(output=evaluation_directory(runs[0] if runs else None, subject))
    return evaluation, candidates, subject
