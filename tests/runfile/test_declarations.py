"""One new file is enough: a declaration that is only there in a temporary folder is known everywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.algorithms.length_penalties import LENGTH_PENALTIES
from headrace.config.algorithms import ALGORITHMS, AlgorithmConfig
from headrace.config.environments import GATES, SAMPLERS
from headrace.config.orchestrator import FILTERS
from headrace.config.registry import Registry
from headrace.config.trainer import LOSSES
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from tests.config.run_files import minimal

REGISTRIES: list[Registry] = [ALGORITHMS, FILTERS, GATES, LENGTH_PENALTIES, LOSSES, SAMPLERS]

NEW_ALGORITHM = '''
"""Sharpened: group-centered rewards to a power, pulled towards a teacher."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from headrace.algorithms.base import Algorithm, MakeContext, RolloutView
from headrace.config.algorithms import ALGORITHMS, AlgorithmConfig, Promises
from headrace.config.model import ModelReference
from headrace.rollout.credit import center


@ALGORITHMS.register
class SharpenedConfig(AlgorithmConfig):
    """Centered rewards, sharpened, for a policy with a teacher."""

    COMPARES = True
    CREDIT = "`sign(c) * abs(c) ** power` of `c = r_i - mean(r)`"

    type: Literal["sharpened"] = "sharpened"
    teacher: ModelReference = "policy"
    """The model that credit is checked against."""
    power: float = Field(2.0, gt=0)
    """What centered rewards are raised to."""
    scale: float = 1.0
    """What credit is multiplied by."""

    def make(self, context: MakeContext) -> "Sharpened":
        return Sharpened(self.power, self.scale, context.reference(self.teacher))

    def promises(self, algorithm: Algorithm) -> Promises:
        return Promises(frozenset({"order"}))


class Sharpened(Algorithm):
    model_role = "teacher"

    def __init__(self, power: float, scale: float, teacher: object) -> None:
        self.power, self.scale, self.teacher = power, scale, teacher

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        centered = center(np.array([rollout.reward for rollout in group]))
        for rollout, c in zip(group, centered, strict=True):
            rollout.assign_advantages(float(self.scale * np.sign(c) * abs(c) ** self.power))
'''

PROGRAM = """
import json, sys
import headrace.algorithms

headrace.algorithms.__path__.append(sys.argv[1])

from headrace.cli.main import main
from headrace.config.base import ConfigError
from headrace.runfile.explain import explain
from headrace.runfile.reading import validate
from headrace.runfile.reference import algorithms_table, reference
from headrace.runfile.run import RunConfig
from headrace.algorithms.base import MakeContext

trees = json.loads(sys.argv[2])
algo = validate(RunConfig, trees["valid"], "test")[0].orchestrator.algo
made = algo.make(MakeContext(64, lambda model: model.name))
try:
    validate(RunConfig, trees["wrong"], "test")
except ConfigError as error:
    wrong = error.problems[0].key
print(json.dumps({
    "made": [made.power, made.scale, made.teacher],
    "wrong": wrong,
    "explained": explain(RunConfig, "orchestrator.algo.power")[0].sentence,
    "page": "Centered rewards, sharpened, for a policy with a teacher." in reference(),
    "row": next(line for line in algorithms_table().splitlines() if "sharpened" in line),
    "torch": "torch" in sys.modules,
}))
sys.exit(main(["check-algorithm", "sharpened"]))
"""


def test_an_algorithm_with_two_keys_a_teacher_and_a_docs_row_is_one_new_file(tmp_path: Path):
    (tmp_path / "sharpened.py").write_text(NEW_ALGORITHM)
    teacher = {"name": "big", "base_url": "http://127.0.0.1:1/v1"}
    section = {"type": "sharpened", "power": 3, "scale": 0.5, "teacher": teacher}
    trees = {
        "valid": minimal(orchestrator={"algo": section}),
        "wrong": minimal(orchestrator={"algo": {**section, "power": -1}}),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(trees)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout.splitlines()[0])
    assert facts["made"] == [3.0, 0.5, "big"]
    assert facts["wrong"] == "orchestrator.algo.power"
    assert facts["explained"] == "What centered rewards are raised to."
    assert facts["page"] and facts["row"].startswith("| `sharpened` | rl | `sign(c)")
    assert not facts["torch"]


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_every_alternative_has_a_description(registry: Registry):
    assert registry.names
    for section in registry.sections.values():
        assert section.__doc__ and section.__doc__.strip().split("\n")[0].endswith((".", "`."))


def test_a_type_cannot_be_registered_twice():
    with pytest.raises(ValueError, match="grpo"):
        ALGORITHMS.register(ALGORITHMS.section("grpo"))


def test_a_field_of_the_base_class_takes_any_registered_alternative():
    for name in ("grpo", "max_rl", "rae"):
        config = validate(RunConfig, minimal(orchestrator={"algo": name}), "test")[0].orchestrator.algo
        assert isinstance(config, AlgorithmConfig) and type(config) is ALGORITHMS.section(name)
