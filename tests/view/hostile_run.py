"""A run whose names and texts attack the page: markup, terminal escapes, bidi overrides, megabytes, 100,000 tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np

from headrace.observe.histograms import BOUNDS, count
from headrace.observe.metrics import MetricsLog, read_metrics
from headrace.observe.status import ProcessStatus
from headrace.rollout.types import Rollout, Sample
from headrace.transport.rollout_files import write_rollouts

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>"
CONTROL = "\x1b[31mred\x07 \u202egnp.exe\u2066 \x00 \u200b"
HOSTILE = f"{MARKUP} {CONTROL} ]]> &lt; ${{7*7}} {{{{7*7}}}}"
NAME = "run <b onmouseover=alert(3)> \u202e\x1b[2J"
MATHS = (
    r"$$x^2 + \frac{1}{2}$$ and \(\sqrt{y}\) but $\href{javascript:alert(4)}{x}$ "
    r"\[\text{<img src=x onerror=alert(5)>}\] $\class{c}{\id{i}{\style{color:red}{z}}}$ "
    r"$<img src=x onerror=alert(6)>$ $\def\a{\a\a}\a$ costs $5 and $6, \(\unknown"
)
"""Formulas, two of which are harmless, and what tries to be one."""
STEP = 5
NOTICE_STEP = 3
LENGTHS = (40, 32_000, 100_000, 12)
"""Tokens of the rollouts of the hostile step, by row."""


def add_hostile_run(folder: Path) -> None:
    """Copy the recorded run `rl` within the folder to a hostile name, with a further step of hostile rollouts."""
    run = folder / NAME
    shutil.copytree(folder / "rl", run)
    answers = (HOSTILE, MATHS, f"{HOSTILE}\n" * 300, "A" * 1_000_000)
    rollouts = [_rollout(row, answer, LENGTHS[row]) for row, answer in enumerate(answers)]
    write_rollouts(run / "rollouts", STEP, rollouts, [])
    for step in range(1, STEP + 1):
        texts = {f"histogram/{name}": count(name, [0.5, 1.0, 2.0 * step]).encode() for name in BOUNDS}
        MetricsLog(run / "metrics.jsonl", "trainer").log(step, texts)
    records = read_metrics(run / "metrics.jsonl")
    at = max(record["time"] for record in records if record["step"] == NOTICE_STEP)
    status = ProcessStatus("trainer", 1, at, "finished", notices=[HOSTILE], notice_times=[at])
    (run / "status").mkdir(exist_ok=True)
    (run / "status" / "trainer.json").write_bytes(msgspec.json.encode(status))


def _rollout(row: int, answer: str, length: int) -> Rollout:
    random = np.random.default_rng(row)
    prompt = 8
    sample = Sample(
        token_ids=random.integers(0, 60, length),
        mask=np.arange(length) >= prompt,
        logprobs=-random.exponential(size=length),
        versions=np.where(np.arange(length) >= prompt, 4, -1),
        prompt_length=prompt,
        streams={"advantages": random.normal(size=length)},
    )
    call = {"id": "1", "type": "function", "function": {"name": MARKUP, "arguments": f'{{"x": "{MARKUP}"}}'}}
    return Rollout(
        env=f"letters {MARKUP}",
        task_key=HOSTILE,
        group_id="group",
        draw_id=0,
        episode=row,
        credited=len(LENGTHS),
        reward=float(row),
        rewards={MARKUP: float(row)},
        messages=[
            {"role": "user", "content": HOSTILE},
            {"role": "assistant", "content": answer, "tool_calls": [call]},
            {"role": "tool", "content": HOSTILE, "tool_call_id": "1"},
        ],
        samples=[sample],
        stop_reason=MARKUP,
    )
