"""The verdicts of checks and their table, comparisons of case results, and problems of shipped samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.rollout.packing import pack
from headrace.rollout.routing import selects_only_unsampled
from headrace.rollout.types import Rollout, Sample
from headrace.tools.check_algorithm.fixtures import SEQ_LEN
from headrace.tools.check_algorithm.runner import CaseResult, Streams

ROUNDING = 1e-5
"""Relative and absolute tolerance: streams are float32."""
ZERO_ON_PROMPTS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "k2_weights", "k3_weights")
Kind = Literal["holds", "fails", "does not apply", "noted"]
COLOURS: dict[Kind, str] = {"holds": "green", "fails": "red", "does not apply": "dim", "noted": "cyan"}


class Verdict(msgspec.Struct, frozen=True):
    kind: Kind
    detail: str = ""
    """What was observed, or why the check does not apply."""


class CheckResult(msgspec.Struct, frozen=True):
    check: str
    description: str
    verdict: Verdict


class ConformanceReport(msgspec.Struct, frozen=True):
    algorithm: str
    cases: int
    checks: list[CheckResult]

    @property
    def passed(self) -> bool:
        return all(check.verdict.kind != "fails" for check in self.checks)


def render_report(report: ConformanceReport) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # do not cut long paths
    for result in report.checks:
        verdict = Text(result.verdict.kind, COLOURS[result.verdict.kind])
        table.add_row(Text(result.check), verdict, _describe(result))
    failed = [result.check for result in report.checks if result.verdict.kind == "fails"]
    end = Text(f"failed: {', '.join(failed)}", "red") if failed else Text("all checks that apply hold", "green")
    return Group(Text(f"{report.algorithm}, on {report.cases} groups"), Text(), table, Text(), end)


def _describe(result: CheckResult) -> Text:
    """Return the check's description and detail."""
    detail = result.verdict.detail
    match result.verdict.kind:
        case "does not apply":
            return Text(detail, "dim")
        case "holds":
            return Text(f"{result.description} ({detail})" if detail else result.description)
        case kind:
            return Text.assemble(result.description, "\n", (detail, "red" if kind == "fails" else "dim"))


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=ROUNDING, atol=ROUNDING, equal_nan=True))


def differing_stream(first: list[Streams], second: list[Streams], *, exactly: bool = False, only: str = "") -> str:
    """Return the name of the first stream whose values differ, or an empty string; `only` limits it to one stream."""

    def equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
        if one is None or other is None:
            return one is other
        return same_bits(one, other) or (not exactly and one.shape == other.shape and close(one, other))

    for rollout, other_rollout in zip(first, second, strict=True):
        for sample, other_sample in zip(rollout, other_rollout, strict=True):
            for name in [only] if only else sorted({*sample, *other_sample}):
                if not equal(sample.get(name), other_sample.get(name)):
                    return name
    return ""


def sampled_advantages(rollouts: Sequence[Rollout], streams: Sequence[Streams]) -> list[np.ndarray]:
    """Return the advantages of each rollout's sampled tokens; values that are not one per token are skipped."""
    advantages = []
    for rollout, of_rollout in zip(rollouts, streams, strict=True):
        pairs = [(s, of.get("advantages")) for s, of in zip(rollout.samples, of_rollout, strict=True)]
        pieces = [v[s.mask] for s, v in pairs if v is not None and np.shape(v) == s.mask.shape]
        advantages.append(np.concatenate([np.zeros(0), *pieces]))
    return advantages


def credit(result: CaseResult) -> list[np.ndarray]:
    """Return the advantages from `score_group`, or from `score_batch` if the group got none."""
    from_group = sampled_advantages(result.case.rollouts, result.after_group)
    return from_group if any(map(len, from_group)) else sampled_advantages(result.case.rollouts, result.after_batch)


def mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else 0.0


def differing_path(before: Any, after: Any, path: str) -> str:
    """Return the path of the first value that differs between two structures, without streams, or an empty string."""
    if isinstance(before, np.ndarray):
        return "" if isinstance(after, np.ndarray) and same_bits(before, after) else path
    if isinstance(before, msgspec.Struct):
        pairs = [(f"{path}.{name}", getattr(before, name), getattr(after, name)) for name in before.__struct_fields__]
        pairs = [pair for pair in pairs if not pair[0].endswith(".streams")]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(f"{path}[{n}]", *pair) for n, pair in enumerate(zip(before, after, strict=True))]
    else:
        return "" if not isinstance(before, list) and before == after else path
    return next(filter(None, (differing_path(one, other, name) for name, one, other in pairs)), "")


def alignment_problems(result: CaseResult) -> Iterator[str]:
    """Yield what the trainer would reject or misread in the shipped rollouts."""
    for number, rollout in enumerate(result.credited.rollouts):
        if not result.drops[number]:
            for problem in filter(None, map(_alignment_problem, rollout.samples)):
                yield f"{result.case.name!r}: rollout {number}: {problem}"


def _alignment_problem(sample: Sample) -> str:
    try:
        pack([sample], SEQ_LEN)
    except ValueError as error:
        return str(error)
    for name in ZERO_ON_PROMPTS:
        if name in sample.streams and np.any(sample.streams[name][: sample.prompt_length]):
            return f"{name} are not 0 on the prompt"
    return ""


def routing_problem(sample: Sample, written: dict[str, np.ndarray], component: str) -> str:
    """Return what routing did wrong to a sample, or an empty string.

    Routing keeps all values that the algorithm wrote, zeros too. If the algorithm wrote no weights for sampled tokens,
    all of them get weight 1 in the loss of `component`.
    """
    if component == "rl" and sample.streams.keys() != written.keys():
        return "routing added a stream"
    weights = f"{component}_weights"
    has_weights = weights in written and not selects_only_unsampled(written[weights], sample.mask)
    for name, values in written.items():
        kept = np.ones_like(sample.mask) if name != weights or component == "rl" or has_weights else ~sample.mask
        if not np.array_equal(sample.streams[name][kept], values[kept], equal_nan=True):
            return f"routing overwrote the algorithm's {name}"
    if component == "rl":
        return ""
    if "rl_weights" not in written and np.any(sample.streams["rl_weights"]):
        return "its tokens are still in the rl loss"
    if not has_weights and np.any(sample.streams[weights][sample.mask] != 1):
        return f"a sampled token does not have weight 1 in the {component} loss"
    return ""


def invented_logprobs(result: CaseResult, healthy: CaseResult) -> Iterator[str]:
    """Yield rollouts with tokens in the ref_kl loss whose reference logprobs a healthy model did not return."""
    for number, (rollout, reference) in enumerate(
        zip(result.credited.rollouts, healthy.credited.rollouts, strict=True)
    ):
        if result.drops[number] or healthy.drops[number]:
            continue
        for sample, expected in zip(rollout.samples, reference.samples, strict=True):
            here, there = sample.streams.get("ref_logprobs"), expected.streams.get("ref_logprobs")
            trained = np.asarray(sample.streams.get("ref_kl_weights", np.zeros(len(sample)))) != 0
            if here is None or there is None or here.shape != there.shape or here.shape != trained.shape:
                continue  # reported by another check
            if not close(here[trained], there[trained]):
                yield f"{result.case.name!r}: rollout {number} is shipped with ref_logprobs that no model returned"
                break
