"""Run files with data, rewards and an objective, and how tests load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from headrace.config.base import Tree
from headrace.runfile.reading import load, merge
from headrace.runfile.run import RunConfig

SPEC = """
objective:
  name: token_grpo
  kwargs:
    reward_mode: weighted_length_penalty
    enable_length_penalty: true
    correctness_weight: 1.0
    length_penalty_lambda: 0.5
    length_penalty_interaction: correctness_length
    strict_format_gate: true
    non_strict_penalty: -1.0
rewards:
  kwargs:
    length_penalty_reward: {tokenizer_name: tiny, group_size: 4, cache_dir: models}
generation: {num_generations: 4, max_new_tokens: 512, temperature: 1.0}
model: tiny
data: {provider: gsm8k, kwargs: {source: train.jsonl}}
trainer: {learning_rate: 1e-5, max_steps: 20}
storage: {cache_dir: STORE}
"""
"""That of the page, with a model, data and an end."""

ROWS = '{"question": "1+1?", "answer": "It is 2. #### 2"}\n{"question": "2+1?", "answer": "It is 3. #### 3"}\n'


def write_store(directory: Path) -> Path:
    """A storage root with a model and data, as far as they are looked at before a run."""
    (directory / "store" / "models" / "tiny").mkdir(parents=True)
    (directory / "store" / "datasets").mkdir()
    (directory / "store" / "datasets" / "train.jsonl").write_text(ROWS)
    return directory / "store"


def small(**changes: Any) -> Tree:
    """The smallest such file; `changes` are merged over it."""
    tree: Tree = {"model": "org/model", "data": {"provider": "arithmetic"}, "trainer": {"max_steps": 10}}
    merge(tree, changes)
    return tree


def load_tree(directory: Path, tree: Tree, *overrides: str) -> tuple[RunConfig, list[str]]:
    file = directory / "mine.yaml"
    file.write_text(yaml.safe_dump(tree))
    return load(RunConfig, [file], overrides)


def run_of(directory: Path, *overrides: str, **changes: Any) -> RunConfig:
    return load_tree(directory, small(**changes), *overrides)[0]
