"""`headrace rescore`: what it tells of saved rollouts under another algorithm, and what it refuses."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tokenizers

from headrace.algorithms.base import Algorithm, RolloutView
from headrace.algorithms.grpo import Grpo
from headrace.cli.main import main, parse, run_command
from headrace.environments.base import Environment, tasks_of
from headrace.environments.shipped.reverse_text import Copying
from headrace.errors import BadInput
from headrace.launch.own_code import save_folders
from headrace.orchestrator.filters import has_no_advantage
from headrace.orchestrator.processing import Filter, TrainProcessing
from headrace.orchestrator.signals import TrainBatch
from headrace.rollout.types import Group, Rollout, Task
from headrace.transport.rollout_files import write_rollouts
from headrace.transport.run_dir import RunDir
from tests.algorithms.groups import make_rollout

RUN = """
output_dir = "{root}"
max_steps = 3
seq_len = 1000
[model]
name = "/no/such/model"
[orchestrator]
batch_size = 12
group_size = 4
[[orchestrator.train.env]]
id = "copy"
[[orchestrator.train.env]]
id = "reverse-text"
"""

SOLVED = [1.0, 1.0, 1.0, 1.0]
MIXED = [1.0, 0.0, 0.0, 0.0]
WORKED = [1.0, 1.0, 0.0, 0.0]


class Curious(Algorithm):
    """Credit by the task, and by nothing else."""

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        for number, view in enumerate(group):
            view.assign_advantages(float(number) if view.task.data else 0.0)


class Learns(Algorithm):
    """Half of what it knew, plus the group's best reward."""

    def __init__(self) -> None:
        self.known = 0.0

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        self.known = self.known / 2 + max(view.reward for view in group)
        for view in group:
            view.assign_advantages(view.reward - self.known)


def by_position(group: Sequence[RolloutView]) -> list[float]:
    return [float(number) for number, _ in enumerate(group)]


class Run:
    """A run directory with steps that went through the orchestrator's own levels and writer."""

    def __init__(self, root: Path, algorithm: Algorithm | None = None, extra: str = "") -> None:
        self.dir = RunDir(root)
        root.mkdir()
        self.dir.config.write_text(RUN.format(root=root) + extra)
        names = ("copy", "reverse-text")
        zero = Filter("zero_advantage", has_no_advantage, enforce=True)
        environments = {name: Environment() for name in names}
        self.processing = TrainProcessing(
            {name: algorithm or Grpo() for name in names}, environments, [], [zero], seq_len=1000
        )
        self.draws = 0

    def step(self, step: int, *groups: tuple[str, Sequence[float], Sequence[int]]) -> None:
        """Groups of an environment, by the rewards and lengths of their rollouts."""
        asyncio.run(self._step(step, groups))

    async def _step(self, step: int, groups: Sequence[tuple[str, Sequence[float], Sequence[int]]]) -> None:
        batch = TrainBatch([])
        for env, rewards, lengths in groups:
            task = tasks_of(Copying(num_tasks=4), "copy")[self.draws % 4]
            group = Group(f"{self.draws}-0", Task(env, task.data, task.key), len(rewards), 0, self.draws)
            played = [make_rollout(r, n, turns=2, tool_tokens=2) for r, n in zip(rewards, lengths, strict=True)]
            for rollout in played:
                rollout.env, rollout.task_key = env, task.key
                rollout.group_id, rollout.draw_id = group.id, group.draw_id
                await self.processing.process_rollout(rollout, group.task)
            batch.groups.append(await self.processing.process_group(group, played))
            self.draws += 1
        await self.processing.process_batch(batch)
        write_rollouts(self.dir.rollouts, step, batch.kept, batch.dropped)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two steps: a worked group and a solved one of copying, a mixed one of reversing."""
    run = Run(tmp_path / "run")
    run.step(1, ("copy", WORKED, [100, 200, 100, 200]), ("copy", SOLVED, [100, 300, 200, 200]))
    run.step(2, ("reverse-text", MIXED, [10, 10, 10, 10]))
    return run


def printed(capsys: pytest.CaptureFixture[str], run: Run, *words: str, code: int = 0) -> dict:
    assert main(["rescore", str(run.dir.root), "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], run: Run, *words: str) -> str:
    assert main(["rescore", str(run.dir.root), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def refused_key(run: Run, *words: str) -> str | None:
    """The key that the error of a refused rescoring names."""
    arguments = parse(["rescore", str(run.dir.root), *words])
    with pytest.raises(BadInput) as error:
        run_command(arguments)
    return error.value.key


def test_the_runs_own_algorithm_changes_nothing(run: Run, capsys: pytest.CaptureFixture[str]):
    found = printed(capsys, run)
    assert (found["same"], found["largest_difference"], found["changed_sides"]) == (True, 0.0, 0)
    assert found["algorithms"] == {"then": "grpo", "now": "grpo"}
    assert (found["groups"], found["rollouts"], found["steps"], found["left_out"]) == (3, 12, [1, 2], {})
    assert found["then"] == found["now"]
    assert main(["rescore", str(run.dir.root)]) == 0
    assert "the run's own algorithm: no difference" in capsys.readouterr().out


def test_a_group_of_which_a_part_is_gone_is_left_out_of_the_self_check(run: Run, capsys: pytest.CaptureFixture[str]):
    file = run.dir.rollouts / "step-00000001.parquet"
    pq.write_table(pq.read_table(file).slice(1), file)  # as if the first had been in a file that is deleted by now
    found = printed(capsys, run)
    assert (found["same"], found["groups"], found["left_out"]) == (True, 2, {"incomplete": 3})


def test_code_beside_the_run_file_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "beside_the_rescored_run.py").write_text(f"from {__name__} import Learns as Mine\n")
    run = Run(tmp_path / "run", Learns(), '[orchestrator.algo]\ntype = "beside_the_rescored_run:Mine"\n')
    run.step(1, ("copy", MIXED, [2, 2, 2, 2]))
    assert "No module named 'beside_the_rescored_run'" in refusal(capsys, run, "--env", "copy")
    save_folders([str(tmp_path / "mine")], run.dir)
    assert printed(capsys, run, "--env", "copy")["same"]


def test_another_algorithm_is_compared_by_environment_length_and_reward(run: Run, capsys: pytest.CaptureFixture[str]):
    found = printed(capsys, run, "--algo", "max_rl")
    # grpo: .5 at every token of step 1, (.75 + 3 * .25) / 4 of step 2; max_rl: 1, (3 + 3 * 1) / 4
    assert [(s["name"], s["then"], s["now"]) for s in found["by_environment"]] == [
        ("copy", pytest.approx(0.5 / 0.875), pytest.approx(1 / 2.5)),
        ("reverse-text", pytest.approx(0.375 / 0.875), pytest.approx(1.5 / 2.5)),
    ]
    assert [(s["name"], s["then"]) for s in found["by_reward"]] == [
        ("0", pytest.approx((0.25 + 0.1875) / 0.875)),
        ("1", pytest.approx((0.25 + 0.1875) / 0.875)),
    ]
    assert [s["name"] for s in found["by_length"]] == ["10", "100", "200", "300"]
    assert (found["same_sign"], found["now"]["advantages"]["highest"]) == (1.0, 3.0)
    assert not found["same"]


def test_a_length_penalty_gives_a_solved_group_a_signal(run: Run, capsys: pytest.CaptureFixture[str]):
    found = printed(capsys, run, "--algo", "grpo", "--length-penalty", "linear", "--env", "copy")
    assert (found["then"]["groups_with_signal"], found["now"]["groups_with_signal"]) == (1, 2)
    # the worked group and, of the solved one, .25 * [100, 300, 200, 200] / 1000 around .05: two stay without a signal
    assert found["now"]["rollouts_that_train"] == 6
    assert found["now"]["advantages"]["highest"] == pytest.approx(0.50625)
    assert found["algorithms"]["now"] == "grpo (linear length penalty)"
    assert [s["name"] for s in found["by_environment"]] == ["copy"]


def test_a_length_penalty_is_added_to_the_credit_of_an_algorithm_that_takes_none_in_a_run(
    run: Run, capsys: pytest.CaptureFixture[str]
):
    words = ["--algo", "max_rl", "--length-penalty", "linear", "--env", "copy"]
    found = printed(capsys, run, *words)
    # max_rl on the worked group gives 1 and -1, the penalty .25 * .5 * [.1, .2, .1, .2] around its mean
    assert found["now"]["advantages"]["highest"] == pytest.approx(1.00625)
    assert found["now"]["advantages"]["lowest"] == pytest.approx(-1.00625)
    assert found["now"]["rollouts_that_train"] == 6  # of the solved group the shortest and the longest
    assert found["algorithms"]["now"] == "max_rl (linear length penalty)"
    assert main(["rescore", str(run.dir.root), *words]) == 0
    assert "max_rl takes no length penalty in a run, grpo and echo do" in capsys.readouterr().out
    assert (run.dir.root / "rescore-max_rl-linear.svg").is_file()


def test_a_key_alone_changes_the_runs_own_algorithm(run: Run, capsys: pytest.CaptureFixture[str]):
    found = printed(capsys, run, "--length-penalty", "linear", "--algo.length_penalty.coef", "0.5", "--steps", "1")
    assert found["algorithms"]["now"] == "grpo (linear length penalty coef = 0.5)"
    assert found["now"]["advantages"]["highest"] == pytest.approx(0.5125)
    assert found["steps"] == [1, 1]


def test_observations_that_a_tool_wrote_train_under_echo(run: Run, capsys: pytest.CaptureFixture[str]):
    found = printed(capsys, run, "--algo", "echo", "--steps", "2:")
    # rl: 1.5 / 4 as before, since every rollout has credit; ce: alpha .1 at every observed token
    assert found["now"]["components"] == {"rl": pytest.approx(0.375 / 0.475), "ce": pytest.approx(0.1 / 0.475)}


def test_the_tables_say_it_in_words_and_the_plot_is_named_by_the_algorithm(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["rescore", str(run.dir.root), "--algo", "max_rl", "--output", str(tmp_path / "plots")]) == 0
    shown = capsys.readouterr().out
    plot = tmp_path / "plots" / "rescore-max_rl.svg"
    assert f"plot: {plot}" in shown
    assert "run: credit of steps 1 to 2: 12 rollouts in 3 groups" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["groups", "with", "a", "signal", "2", "(66.7%)", "2", "(66.7%)"] in lines
    assert ["reverse-text", "33.3%", "2.8%", "42.9%", "60.0%", "+17.1"] in lines
    assert "|advantage| x weight (rl)" in shown
    assert "<svg" in plot.read_text()
    assert main(["rescore", str(run.dir.root), "--length-penalty", "turns"]) == 0
    assert (run.dir.root / "rescore-grpo-turns.svg").is_file()


def test_ones_own_algorithm_sees_the_tasks_of_the_run(run: Run, capsys: pytest.CaptureFixture[str]):
    algorithm = f"{__name__}:by_position"
    found = printed(capsys, run, "--algo", "custom", "--algo.import_path", algorithm, "--env", "copy", "--steps", ":1")
    assert found["now"]["advantages"]["highest"] == 3
    assert printed(capsys, run, "--algo", f"{__name__}:Curious", "--env", "copy")["now"]["advantages"]["highest"] == 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--algo max_rl --algo.length_penalty.type linear", "algo.length_penalty = "),
        ("--algo max_rl --length-penalty short", 'length_penalty.type = "short"'),
        (
            "--algo opd --length-penalty linear --algo.teacher.name big --algo.teacher.base_url http://localhost:9/v1",
            '--length-penalty = "linear"',
        ),
        ("--algo gpro", 'algo.type = "gpro"'),
        ("--algo opd", "algo.teacher: "),
        ("--algo opsd", '--algo.teacher = "policy"'),
        ("--algo rlcsd", '--algo.teacher = "policy"'),
        (
            "--algo sft --algo.teacher.name big --algo.teacher.base_url http://localhost:9/v1",
            '--algo = "sft"',
        ),
        ("--env nowhere", '--env = "nowhere"'),
        ("--steps 7:9", '--steps = "7:9": '),
        ("--orchestrator.seed 3", "--orchestrator.seed: "),
        ("--algo grpo --algo.lenght_penalty.type linear", "algo.lenght_penalty: "),
    ],
)
def test_what_cannot_be_told_is_refused_with_a_way_out(
    run: Run, words: str, named: str, capsys: pytest.CaptureFixture[str]
):
    assert named in refusal(capsys, run, *words.split())


def test_a_policy_that_a_users_algorithm_would_ask_is_gone(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    algorithm = ["--algo", "headrace.algorithms.opsd:Opsd", "--algo.teacher", "policy"]
    assert 'model = "/no/such/model": ' in refusal(capsys, run, *algorithm)
    (tmp_path / "config.json").write_text("{}")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    run.dir.config.write_text(run.dir.config.read_text().replace("/no/such/model", str(tmp_path)))
    assert "asks the policy, and the policy of that time is gone" in refusal(capsys, run, *algorithm)


def test_rollouts_that_another_model_played_have_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    teacher = (
        '[orchestrator.train.env.algo]\ntype = "sft"\nteacher = {name = "big", base_url = "http://localhost:9/v1"}'
    )
    run = Run(tmp_path / "run", extra=teacher)
    run.step(1, ("copy", MIXED, [2, 2, 2, 2]))
    assert "its rollouts were sampled by big, not by the policy" in refusal(capsys, run, "--algo", "grpo")
    assert printed(capsys, run, "--algo", "grpo", "--env", "copy")["same"]


def test_echo_is_refused_where_the_authors_are_unknown(tmp_path: Path):
    run = Run(tmp_path / "run")
    samples = make_rollout(1.0, 4, turns=2, tool_tokens=2, roles_known=False)
    samples.env, samples.group_id, samples.credited = "copy", "0-0", 1
    samples.samples[0].set_stream("advantages", [1.0] * len(samples.samples[0]))
    write_rollouts(run.dir.rollouts, 1, [samples], [])
    assert refused_key(run, "--algo", "echo") == "--algo"


def test_tasks_that_are_gone_are_named(run: Run):
    by_position = ("--algo", "custom", "--algo.import_path", f"{__name__}:by_position")
    assert refused_key(run, *by_position, "--env", "reverse-text") == "task"
    run.dir.config.write_text(run.dir.config.read_text().replace('"copy"', '"my_env:Gone"\nname = "copy"'))
    assert refused_key(run, *by_position, "--env", "copy") == "env"


def test_a_run_without_rollouts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Run(tmp_path / "run")
    assert "headrace: " in (message := refusal(capsys, run)) and "/rollouts: " in message
    unfinished = Rollout(env="copy", group_id="0-0", reward=1.0)
    write_rollouts(run.dir.rollouts, 1, [], [(unfinished, "off_policy")])
    assert "1 off_policy" in refusal(capsys, run)


def test_a_state_that_is_not_there_any_more_shows_in_the_self_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Run(tmp_path / "run", Learns(), f'[orchestrator.algo]\ntype = "{__name__}:Learns"\n')
    for step in (1, 2):
        run.step(step, ("copy", MIXED, [2, 2, 2, 2]))
    assert printed(capsys, run, "--env", "copy")["same"]
    found = printed(capsys, run, "--env", "copy", "--steps", "2", code=1)
    assert (found["same"], found["largest_difference"]) == (False, 0.5)
    assert main(["rescore", str(run.dir.root), "--env", "copy", "--steps", "2"]) == 1
    assert "Either it keeps a state from group to group, or its code has changed" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["", ":", "a:b", "1:2:3", "-1"])
def test_a_range_of_steps_must_be_one(steps: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["rescore", "run", f"--steps={steps}"])
    assert "is not a range of steps" in capsys.readouterr().err
