"""`--algo.key value`: the same for every command that is about one algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.check_algorithm import read_section
from headrace.config.base import ConfigError, Tree
from headrace.runfile.reading import put_algorithm_keys
from tests.refusals import refused


@pytest.mark.parametrize(
    ("section", "words", "then"),
    [
        ({}, "--algo.normalize std", {"normalize": "std"}),
        ({"teacher": "policy"}, "--algo.teacher.name big", {"teacher": {"name": "big"}}),
        ({"teacher": {"name": "big"}}, "--algo.teacher.timeout 9", {"teacher": {"name": "big", "timeout": 9}}),
        (
            {"length_penalty": "linear"},
            "--algo.length_penalty.coef 2",
            {"length_penalty": {"type": "linear", "coef": 2}},
        ),
        ({"terms": [{"import_path": "a:b"}]}, "--algo.terms.0.import_path c:d", {"terms": [{"import_path": "c:d"}]}),
    ],
)
def test_a_key_is_set_and_a_short_form_in_its_way_spelled_out(section: Tree, words: str, then: Tree):
    put_algorithm_keys(section, words.split())
    assert section == then


@pytest.mark.parametrize("word", ["--trainer.optim.lr", "--algo"])
def test_other_keys_are_refused(word: str):
    with refused(ConfigError, key=word):
        put_algorithm_keys({}, [word, "1"])


def test_a_plain_value_has_no_keys():
    with refused(ConfigError, key="--algo.beta.x"):
        put_algorithm_keys({"beta": 0.5}, ["--algo.beta.x", "1"])


def test_an_algorithm_that_asks_the_policy_can_be_checked_with_another_teacher(tmp_path: Path):
    file = tmp_path / "algo.toml"
    file.write_text('teacher = "policy"\n')
    teacher = {"name": "big", "base_url": "http://localhost:9/v1"}
    words = [word for key, value in teacher.items() for word in (f"--algo.teacher.{key}", value)]
    assert read_section("opsd", file, words)["teacher"] == teacher
