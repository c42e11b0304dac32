"""On-policy distillation against GRPO: steps to the teacher's reward, from the same start at the same learning rate.

The teacher, of the same size, saw only reversals, so that it reverses most words; the start copies three in four.
Distillation has a signal for every token, GRPO one number for a reply.
"""

from __future__ import annotations

from benchmarks.science.frame import Claim, Experiment, Run
from benchmarks.science.length_penalty import measure as measure_replies
from benchmarks.science.miniature import Played, Setting

GRPO = ("examples/reverse-text/rl.toml", "benchmarks/science/reversal.toml")
TEACHER = "benchmarks/science/teacher.toml"
REACHED = 0.85
"""Share of the teacher's reward that counts as reached."""
STEPS = f"steps to {REACHED} of the teacher's reward"


def measure(played: Played) -> dict[str, float]:
    return {"reward": measure_replies(played)["accuracy"]}


def steps_to_teacher(run: Run, all_runs: dict[str, Run]) -> dict[str, float]:
    """Return the first evaluated step that reached the teacher; the last step if none was, which is a lower bound."""
    points = run["curves"]["reward"]
    level = REACHED * all_runs["teacher"]["curves"]["reward"][0][1]
    return {STEPS: next((step for step, reward in points if reward >= level), points[-1][0])}


EXPERIMENT = Experiment(
    "On-policy distillation against GRPO: held-out reward",
    {
        "distillation": Setting((*GRPO[:1], "examples/algorithms/opd.toml", *GRPO[1:]), teacher=TEACHER),
        "GRPO": Setting(GRPO),
        "teacher": Setting(GRPO, {"model.sft": TEACHER, "trainer.optim.lr": 1e-9, "max_steps": 1}),
    },
    measure,
    (Claim(STEPS, "distillation", "GRPO", sign=-1), Claim("reward", "distillation", "GRPO")),
    plotted="reward",
    derive=steps_to_teacher,
)
