"""Evaluation beside training: how full the permits stay, and how much sooner a run ends than with one that blocks.

    python benchmarks/orchestrator/eval_overlap.py [RUN_FILE] [--steps 101] [--real 60]

Permits, the size of a step and of its groups, and what is evaluated how often are those of the run file, which is
`examples/math/rl.toml`: steps of 256 rollouts, and four answers to each of 500 problems every 20 steps. Latency is
lognormal with a median of 2 s and sigma 1. The pipeline itself runs in simulated time: without evaluation, as it is,
and in a harness that blocks, where training drains, evaluation runs alone to its last straggler, and training resumes.
`--real` adds that many seconds of a real orchestrator process over sockets, as its own gauges show it. Busy is the
share of permits with a running episode, over time: in all, and from an evaluation's trigger to the close of its epoch.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import math
import random
import tempfile
from pathlib import Path

import msgspec
from fake_engine import FakeEngine
from fake_run import COMPLETION_TOKENS, FOREVER, running

from headrace.errors import BadInput
from headrace.observe.metrics import Tail
from headrace.orchestrator.evaluation import EvalEnv, EvalSource
from headrace.orchestrator.journal_buffer import JournalBuffer
from headrace.orchestrator.pipeline import Pipeline, PipelineSettings
from headrace.orchestrator.signals import (
    Action,
    Arrival,
    BatchDone,
    CancelEpisode,
    Episode,
    Event,
    GroupDone,
    Kind,
    Load,
    Loaded,
    ProcessBatch,
    ProcessGroup,
    Published,
    RunEpisode,
    ScoredGroup,
    Ship,
    Shipped,
    Tick,
    TrainBatch,
)
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.rollout.types import Rollout, RolloutError, Task, Turn
from headrace.rollout.version import Version
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.trainer.tiny import write_tiny_model
from headrace.transport.journal_entries import Clock, Totals

EXAMPLE = Path(__file__).parents[2] / "examples" / "math" / "rl.toml"
MEDIAN, SIGMA = 2.0, 1.0
TRAINING, WRITING, LOADING = 1.0, 0.05, 0.1
"""Seconds for a training step, a batch file, and new weights in the engine."""


class Shape(msgspec.Struct, frozen=True):
    """What a run file says about how many episodes there are."""

    permits: int
    batch: int
    group: int
    async_level: int
    interval: int
    """Steps between two evaluations."""
    eval_tasks: int
    eval_group: int

    @classmethod
    def of(cls, file: Path) -> Shape:
        config = load(RunConfig, [file])[0].orchestrator
        (evaluated,) = config.eval.env
        permits, batch = config.max_inflight_rollouts, config.batch_size
        interval, tasks, group = (
            getattr(evaluated, key) or getattr(config.eval, key) for key in ("interval", "num_examples", "group_size")
        )
        if not isinstance(permits, int) or batch is None or tasks is None:
            fix = "Set max_inflight_rollouts, batch_size and eval.num_examples of [orchestrator] to numbers."
            raise BadInput("the shape of the run is not in the file", file=file, fix=fix)
        return cls(permits, batch, config.group_size, config.max_async_level, interval, tasks, group)


class Busy(msgspec.Struct):
    """Episode seconds over permit seconds."""

    total: int
    """Permits that there are."""
    episodes: float = 0.0
    permits: float = 0.0

    def add(self, running: int, seconds: float) -> None:
        self.episodes += running * seconds
        self.permits += self.total * seconds

    @property
    def shown(self) -> str:
        return f"{self.episodes / self.permits:.1%}" if self.permits else ""


class SimulatedRun:
    """The real pipeline; everything that it asks for takes simulated time."""

    def __init__(self, shape: Shape, *, blocking: bool = False, seed: int = 0) -> None:
        self.now = 0.0
        self.always, self.across = Busy(shape.permits), Busy(shape.permits)
        self.dropped = 0
        self._blocking = blocking
        self._rng = random.Random(seed)
        self._agenda: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._running: dict[int, Episode] = {}
        self._held: dict[int, Episode] = {}
        """Episodes that the pipeline has started and the blocking harness has not."""
        self._trained_at = 0.0
        sizes = {"train": shape.group}
        settings = PipelineSettings(
            FOREVER, shape.batch, None, 512, sizes, shape.permits, max_async_level=shape.async_level
        )
        tasks, evals = ([Task(name, {"n": n}) for n in range(shape.eval_tasks)] for name in ("train", "heldout"))
        source = TrainSource([TrainTasks("train", tasks, 1.0)], seed)
        heldout = EvalEnv("heldout", evals, shape.interval, group_size=shape.eval_group)
        eval_source = EvalSource([heldout], {"heldout": Version(0, 0)})
        buffer = JournalBuffer(Totals(), Clock(), 0, self.now)
        self.pipeline = Pipeline(settings, source, eval_source, buffer, Version(0, 0), 1, self.now)

    def run(self, steps: int) -> None:
        """Until so many batches have shipped; the run would go on."""
        self._carry_out(self.pipeline.start(self.now))
        while self.pipeline.step <= steps:
            wake_at = self.pipeline.wake_at
            if wake_at is not None and wake_at <= self._agenda[0][0]:
                self._advance(wake_at, Tick())
            else:
                time, _, event = heapq.heappop(self._agenda)
                self._advance(time, event)

    def _advance(self, time: float, event: Event) -> None:
        self.always.add(len(self._running), time - self.now)
        if self.pipeline.evals.open_evals:
            self.across.add(len(self._running), time - self.now)
        self.now = time
        if isinstance(event, Arrival):
            if event.episode.id not in self._running and event.episode.id not in self._held:
                return  # it was cancelled and has arrived
            self._running.pop(event.episode.id, None)
            self._held.pop(event.episode.id, None)
        self._carry_out(self.pipeline.handle(event, time))
        self._start_held()

    def _after(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._numbers), event))

    # -- what the pipeline asks for -------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case RunEpisode():
                    self._held[action.episode.id] = action.episode
                case CancelEpisode():
                    self._after(0.0, Arrival(action.episode, [_rollout(action.episode, 0, 0.0, action.reason)]))
                case ProcessGroup():
                    self._after(0.0, GroupDone(_scored(action)))
                case ProcessBatch():
                    if isinstance(action.batch, TrainBatch):
                        action.batch.kept = action.batch.rollouts
                    self._after(0.0, BatchDone(action.batch))
                case Ship():
                    self.dropped += len(action.entries.dropped)
                    self._after(WRITING, Shipped(action.step))
                    self._trained_at = max(self._trained_at, self.now + WRITING) + TRAINING
                    self._after(self._trained_at - self.now, Published(Version(0, action.step)))
                case Load():
                    self._after(LOADING, Loaded(action.version))
        self._start_held()

    def _start_held(self) -> None:
        for episode in list(self._held.values()):
            if self._may_start(episode):
                del self._held[episode.id]
                self._running[episode.id] = episode
                rollout = _rollout(episode, self.pipeline.version.step, self._rng.random())
                self._after(self._rng.lognormvariate(math.log(MEDIAN), SIGMA), Arrival(episode, [rollout]))

    def _may_start(self, episode: Episode) -> bool:
        if not self._blocking or not self.pipeline.evals.open_evals:
            return True
        return episode.kind is Kind.EVAL and all(other.kind is Kind.EVAL for other in self._running.values())


def _rollout(episode: Episode, version: int, reward: float, cancelled: str = "") -> Rollout:
    error = RolloutError(cancelled) if cancelled else None
    turn = Turn([0], [0], [0.0], [version], 1.0)  # type: ignore[arg-type]
    return Rollout(episode.env, draw_id=episode.group.draw_id, reward=reward, turns=[turn], error=error)


def _scored(action: ProcessGroup) -> ScoredGroup:
    credited = [(rollout.agent, rollout.reward) for rollout in action.rollouts]
    return ScoredGroup(action.kind, action.group, action.rollouts, [], arrived=len(action.rollouts), credited=credited)


async def real_busy(model: Path, seconds: float, shape: Shape) -> tuple[Busy, Busy]:
    """The same as a process over sockets, with a trainer that needs no time: busy in all, and across evaluations."""
    engine = FakeEngine(model, COMPLETION_TOKENS, MEDIAN, SIGMA)
    settings = {
        "batch_size": shape.batch,
        "group_size": shape.group,
        "max_inflight_rollouts": shape.permits,
        "max_async_level": shape.async_level,
        "max_off_policy_steps": 8,
        "log_loop_interval": 0.25,
        "eval": {
            "interval": shape.interval,
            "num_examples": shape.eval_tasks,
            "group_size": shape.eval_group,
            "eval_base_model": False,
            "env": [{"id": "fake_run:OneTurn", "name": "heldout"}],
        },
    }
    always, across = Busy(shape.permits), Busy(shape.permits)
    async with running(engine, model, settings) as orchestrator:
        while engine.in_flight < shape.permits:
            orchestrator.check()
            await asyncio.sleep(0.05)
        gauges = Tail(orchestrator.run.metrics)
        gauges.read()
        await asyncio.sleep(seconds)
        orchestrator.check()
        records = [record for record in gauges.read() if "dispatcher/inflight_eval" in record]
    for record in records:
        train, evaluation = record["dispatcher/inflight_train"], record["dispatcher/inflight_eval"]
        always.add(train + evaluation, 1.0)
        if evaluation:
            across.add(train + evaluation, 1.0)
    return always, across


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_file", nargs="?", type=Path, default=EXAMPLE, metavar="RUN_FILE")
    parser.add_argument("--steps", type=int, default=101)
    parser.add_argument("--real", type=float, default=0.0, metavar="SECONDS")
    arguments = parser.parse_args()
    shape = Shape.of(arguments.run_file)
    print(f"{'evaluation':<26}{'busy':>8}{'across evaluations':>20}{'seconds':>10}{'ratio':>7}{'dropped':>9}")
    runs = {
        "none": SimulatedRun(msgspec.structs.replace(shape, interval=FOREVER)),
        "overlapping": SimulatedRun(shape),
        "blocking": SimulatedRun(shape, blocking=True),
    }
    for run in runs.values():
        run.run(arguments.steps)
    for name, run in runs.items():
        ratio = run.now / runs["overlapping"].now
        print(f"{name:<26}{run.always.shown:>8}{run.across.shown:>20}{run.now:>10.0f}{ratio:>7.2f}{run.dropped:>9}")
    if arguments.real:
        with tempfile.TemporaryDirectory() as directory:
            write_tiny_model(Path(directory))
            always, across = asyncio.run(real_busy(Path(directory), arguments.real, shape))
        print(f"{'overlapping, over sockets':<26}{always.shown:>8}{across.shown:>20}")


if __name__ == "__main__":
    main()
