"""An `algo` section by itself, checked as a run file's is."""

from __future__ import annotations

from headrace.config.algorithms import ALGORITHMS, AlgorithmConfig
from headrace.config.base import Tree
from headrace.config.orchestrator import OrchestratorConfig
from headrace.runfile.reading import validate
from headrace.tools.check_algorithm.stage import SEQ_LEN

TEACHER = {"name": "stand-in", "base_url": "http://stand-in.invalid/v1"}
"""Who is named where somebody must be: nobody is ever asked."""


def algorithm_config(section: Tree, where: str) -> AlgorithmConfig:
    """Raises `ConfigError` with every problem under the key that it has."""
    named = any(key in section for key in ("teacher", "model", "sampling"))
    needed = ALGORITHMS.section(ALGORITHMS.tag(section)).NEEDS_TEACHER and not named
    tree = {"algo": {**section, "teacher": TEACHER} if needed else section, "seq_len": SEQ_LEN}
    return validate(OrchestratorConfig, tree, where)[0].algo
