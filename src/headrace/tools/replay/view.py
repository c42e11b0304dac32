"""A replay as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.observe.console import plain_table
from headrace.tools.replay.report import Anatomy, ColumnDifference, ReplayReport

SHOWN_METRICS = ("loss", "entropy", "mismatch_kl", "optim/grad_norm", "optim/lr")
MAX_DIFFERING_METRICS = 8
MAX_MICRO_BATCHES = 8


def render(report: ReplayReport) -> RenderableType:
    parts: list[RenderableType] = [Text("\n".join(_headline(report))), _metrics(report)]
    if report.tokens:
        parts += [Text(f"\ntokens, recorded by the {report.tokens_from}"), _tokens(report.tokens)]
    else:
        key = "trainer.token_export.interval = 1"
        parts.append(Text(f"\nthe run recorded no tokens of this step: {key} records those of every step"))
    parts += _anatomy(report.anatomy)
    parts.append(Text("\n" + verdict_line(report)))
    return Group(*parts)


def verdict_line(report: ReplayReport) -> str:
    """Return one sentence with the result, and what may explain a difference."""
    verdict = report.verdict
    if verdict == "not compared":
        return "not compared: the run recorded neither metrics nor tokens of this step"
    if verdict == "bit-equal":
        return "bit-equal: every recorded number is the same to the last bit"
    worst = max(report.errors, key=lambda name: report.errors[name])
    first = (
        "" if report.first_differing_step is None else f"; the first step that differs is {report.first_differing_step}"
    )
    sign = ">" if verdict == "differs" else "<="
    return f"{verdict}: {worst} by {report.errors[worst]:.2g} {sign} {report.tolerance:g}{first}"


def _headline(report: ReplayReport) -> Iterator[str]:
    before = range(report.first, report.step)
    steps = (
        f" through steps {before[0]} to {before[-1]}"
        if len(before) > 1
        else f" through step {before[0]}"
        if before
        else ""
    )
    yield f"step {report.step} of {report.run}, from {report.start}{steps}"
    own = report.platform
    versions = ", ".join(f"{name} {version}" for name, version in own.versions.items())
    yield f"replayed on {own.device} ({own.machine}, {own.dtype}, threads: {own.threads}): {versions}"
    if report.recorded_platform is None:
        yield "recorded by an older version, which did not say on what"
    elif differences := report.recorded_platform.differences(own):
        yield f"recorded with {'; '.join(differences)}"
    if report.other_batches:
        yield f"not the batches whose digests the journal has: steps {', '.join(map(str, report.other_batches))}"
    yield ""


def _metrics(report: ReplayReport) -> Table:
    table = plain_table("metric", "recorded", "replayed", "error")
    pairs = {pair.name: pair for pair in report.metrics}
    differing = [pair.name for pair in report.metrics if pair.error][:MAX_DIFFERING_METRICS]
    for name in dict.fromkeys((*SHOWN_METRICS, *differing)):
        if name in pairs:
            pair = pairs[name]
            table.add_row(name, _number(pair.recorded), _number(pair.replayed), _difference(pair.error))
        elif name in report.replayed:
            table.add_row(name, "", _number(report.replayed[name]), "")
    return table


def _tokens(columns: Sequence[ColumnDifference]) -> Table:
    table = plain_table("column", "tokens", "differ", "largest", "mean", "first", left=["first"])
    for each in columns:
        first = "" if each.first is None else "sample {}, position {}".format(*each.first)
        sizes = _difference(each.largest), _difference(each.mean)
        table.add_row(each.name, f"{each.tokens:,}", f"{each.differing:,}", *sizes, first)
    return table


def _anatomy(anatomy: Anatomy) -> Iterator[RenderableType]:
    if anatomy.zero:
        yield Text(f"\nthe gradient is 0: {anatomy.zero}")
    if anatomy.num_bad_tokens or anatomy.bad_parameters:
        yield from _not_finite(anatomy)
    if anatomy.components:
        table = plain_table("loss", "tokens", "masked", "value", "share of the gradient")
        for part in anatomy.components:
            table.add_row(part.name, f"{part.tokens:,}", f"{part.masked:,}", _number(part.loss), f"{part.share:.1%}")
        yield from (Text(""), table)
    names = [part.name for part in anatomy.components]
    table = plain_table("micro-batch", "sequences", "tokens", "trained", *(f"{name} loss" for name in names))
    for number, each in enumerate(anatomy.micro_batches[:MAX_MICRO_BATCHES], 1):
        counts = (number, each.sequences, each.computed_tokens, each.scored_tokens)
        table.add_row(*(f"{count:,}" for count in counts), *(_number(each.losses.get(name)) for name in names))
    yield from (Text(""), table)
    if (more := len(anatomy.micro_batches) - MAX_MICRO_BATCHES) > 0:
        yield Text(f"and {more} more")
    table = plain_table(
        "rollout", "env", "tokens", "advantage", "entropy", "drift", "share of the gradient", left=["env"]
    )
    for rollout in anatomy.rollouts:
        numbers = (f"{value:.4g}" for value in (rollout.advantage, rollout.entropy, rollout.drift))
        share = "not finite" if math.isnan(rollout.share) else f"{rollout.share:.1%}"
        table.add_row(str(rollout.rollout), rollout.env, f"{rollout.tokens:,}", *numbers, share)
    yield from (Text(""), table)
    table = plain_table("parameter", "norm of its gradient")
    for name, norm in anatomy.gradient_norms.items():
        table.add_row(name, _number(norm))
    yield from (Text(""), table)


def _not_finite(anatomy: Anatomy) -> Iterator[RenderableType]:
    yield Text(
        f"\nnot finite: tokens: {anatomy.num_bad_tokens:,}, gradients of parameters: {len(anatomy.bad_parameters):,}"
    )
    table = plain_table("sample", "position", "rollout", "env", "token", "values", left=["env", "token", "values"])
    for token in anatomy.bad_tokens:
        place = (str(number) for number in (token.sample, token.position, token.rollout))
        table.add_row(*place, token.env, repr(token.text), ", ".join(token.columns))
    yield table


def _number(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.9g}"


def _difference(value: float) -> str:
    return "equal" if value == 0 else f"{value:.2g}"
