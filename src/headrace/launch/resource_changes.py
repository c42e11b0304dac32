"""The changes of a run file with which a run that is too large for this machine fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import combinations
from typing import Any, NamedTuple

from headrace.config.sft import OfflineConfig
from headrace.config.trainer import AdamWConfig, LoraConfig, TrainingConfig
from headrace.errors import BadInput
from headrace.launch.resource_plan import AnyRun, ResourcePlan, gib, trainer_of
from headrace.runfile.run import RunConfig

MAX_CHANGES = 3
"""Changes of the run file that are combined to make it fit."""


class Change(NamedTuple):
    """A change of a run file that may make it fit."""

    key: str
    text: str
    apply: Callable[[AnyRun], AnyRun]


def find_refusal(config: AnyRun, plan_of: Callable[[AnyRun], ResourcePlan]) -> BadInput | None:
    """Return why a run cannot fit, with the changes for which its plan fits; None if it may fit."""
    plan = plan_of(config)
    if plan.may_fit:
        return None
    facts = [
        f"{budget.resource}: at least {gib(budget.certain)} GiB are needed, and {gib(budget.available)} exist "
        f"({', '.join(f'{part.name} {gib(part.size)}' for part in budget.parts if part.is_certain and part.size)})"
        for budget in plan.budgets
        if budget.cannot_fit
    ]
    # An engine's refusal repeats what the budget of its GPU shows.
    facts = facts or [problem.fact for problem in plan.problems]
    solutions = find_solutions(config, lambda changed: plan_of(changed).fits)
    if not solutions:
        fix = "No setting of the run file makes it fit: take a smaller model, or a larger machine."
        return BadInput("; ".join(facts), key="model.name", value=config.model.name, fix=fix)
    texts = [" and ".join(change.text for change in solution) for solution in solutions]
    key = solutions[0][0].key
    value = reduce(getattr, key.split("."), config)  # None for a section that is not set
    return BadInput("; ".join(facts), key=key, value=value, fix=f"It fits with {', or '.join(texts)}.")


def find_solutions(config: AnyRun, fits: Callable[[AnyRun], bool]) -> list[tuple[Change, ...]]:
    """Return the smallest combinations of changes that make a run fit."""
    changes = list(changes_of(config))
    for count in range(1, MAX_CHANGES + 1):
        solutions = []
        for solution in combinations(changes, count):
            changed = config
            for change in solution:
                changed = change.apply(changed)
            if fits(changed):
                solutions.append(solution)
        if solutions:
            return solutions
    return []


def changes_of(config: AnyRun) -> Iterator[Change]:
    """Yield the changes that need less of something, those that change the training least first."""
    trainer = trainer_of(config)
    prefix = "trainer." if isinstance(config, RunConfig) else ""

    def change(key: str, text: str, update: Callable[[TrainingConfig], dict[str, Any]]) -> Change:
        return Change(f"{prefix}{key}", text.format(prefix), lambda run: _with_trainer(run, update(trainer_of(run))))

    def within(section: str, **values: Any) -> Callable[[TrainingConfig], dict[str, Any]]:
        return lambda run: {section: getattr(run, section).model_copy(update=values)}

    if trainer.ckpt.keep_last > 1:
        yield change("ckpt.keep_last", "{0}ckpt.keep_last = 1", within("ckpt", keep_last=1))
    if config.max_steps is not None and trainer.ckpt.interval < config.max_steps:
        text = f"{{0}}ckpt.interval = {config.max_steps} (one checkpoint)"
        yield change("ckpt.interval", text, within("ckpt", interval=config.max_steps, permanent_interval=None))
    if isinstance(config, RunConfig):
        for transport in ("link", "files"):
            if config.trainer.weights.transport != transport:
                text = f'{{0}}weights.transport = "{transport}"'
                yield change("weights.transport", text, within("weights", transport=transport))
    if trainer.lora is None and isinstance(trainer.optim, AdamWConfig) and trainer.optim.state_bits > 8:
        yield change("optim.state_bits", "{0}optim.state_bits = 8", within("optim", state_bits=8))
    if trainer.lora is None and not trainer.optim.offload_state:
        yield change("optim.offload_state", "{0}optim.offload_state = true", within("optim", offload_state=True))
    if trainer.lora is not None and trainer.lora.save_merged:
        yield change("lora.save_merged", "{0}lora.save_merged = false", within("lora", save_merged=False))
    if trainer.lora is None:
        adapter = LoraConfig()
        yield change("lora", "an adapter ([{0}lora])", lambda run: {"lora": adapter})


def _with_trainer(config: AnyRun, update: dict[str, Any]) -> AnyRun:
    if isinstance(config, OfflineConfig):
        return config.model_copy(update=update)
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=update)})
