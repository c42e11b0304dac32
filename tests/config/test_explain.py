"""Every key of a run file explains itself."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.base import Config, ConfigError
from headrace.config.sft import SftConfig
from headrace.runfile.explain import children, explain, keys, kinds_of, nearest, summary_of, values_at
from headrace.runfile.run import RunConfig

ROOTS = [RunConfig, SftConfig]


@pytest.mark.parametrize("root", ROOTS)
def test_every_key_has_a_type_a_default_and_a_sentence(root: type[Config]):
    lacking = [
        key
        for key in keys(root)
        for entry in explain(root, key)
        if not (entry.type and entry.default and entry.sentence)
    ]
    assert lacking == [], "write a text under the field in its model"


@pytest.mark.parametrize("root", ROOTS)
def test_every_type_of_section_has_a_sentence(root: type[Config]):
    assert [(key, kind) for key in keys(root) for kind, text in kinds_of(root, key).items() if not text] == []


def test_a_number_is_explained_with_its_limits_its_default_and_its_text():
    (entry,) = explain(RunConfig, "trainer.optim.max_grad_norm")
    assert entry[:3] == (("adamw", "muon", "sgd"), "number, at least 0", "1.0")
    assert "norm" in entry.sentence


@pytest.mark.parametrize(
    ("key", "type", "default"),
    [
        ("output_dir", "path", "none: it must be set"),
        ("max_steps", "whole number, at least 1, or unset", "unset"),
        ("model.dtype", '"auto", "float32" or "bfloat16"', '"auto"'),
        ("orchestrator.max_inflight_rollouts", 'whole number, at least 1 or "auto"', '"auto"'),
        ("orchestrator.train.env", "list of tables", "[]"),
        ("orchestrator.algo.roles", "table of tables", "{ tool = { alpha = 0.1 } }"),
        ("trainer.optim", "table of type adamw, muon or sgd", 'the defaults of its keys, type = "adamw"'),
        ("trainer.optim.type", '"adamw", "muon" or "sgd"', '"adamw"'),
        ("trainer.token_export.steps", "list of whole numbers, at least 1", "[]"),
        ("trainer.lora", "table or unset", "unset"),
        ("inference.compile", "true or false", "true"),
        ("orchestrator.algo.length_penalty.coef", "number, at least 0", "0.25"),
    ],
)
def test_types_and_defaults_in_words(key: str, type: str, default: str):
    (entry,) = explain(RunConfig, key)
    assert (entry.type, entry.default) == (type, default)


def test_a_key_that_differs_by_the_type_of_its_section_has_an_entry_for_each():
    found = {entry.kinds: entry.default for entry in explain(RunConfig, "trainer.optim.momentum")}
    assert found == {("muon",): "0.95", ("sgd",): "0.0"}


def test_keys_in_lists_and_tables_are_found_with_and_without_an_index_or_a_name():
    plain = explain(RunConfig, "orchestrator.train.env.algo.length_penalty.coef")
    assert explain(RunConfig, "orchestrator.train.env.0.algo.length_penalty.coef") == plain
    assert explain(RunConfig, "orchestrator.algo.roles.tool.alpha") == explain(
        RunConfig, "orchestrator.algo.roles.alpha"
    )


def test_in_a_table_of_free_keys_any_name_is_one_of_the_users_own():
    (entry,) = explain(RunConfig, "orchestrator.train.env.0.args.split")
    assert entry.type == "anything"
    (table,) = explain(RunConfig, "orchestrator.train.env.args")
    assert entry.sentence.endswith(table.sentence)


def test_a_section_lists_its_keys_in_order():
    assert children(RunConfig, "trainer.ref_kl") == ["trainer.ref_kl.mask_low", "trainer.ref_kl.kl_tau"]
    assert children(RunConfig, "trainer.ref_kl.kl_tau") == []
    assert kinds_of(RunConfig, "trainer.loss")["reinforce"] == "The plain policy gradient."


def test_a_list_of_keys_has_the_first_sentence_of_each():
    assert summary_of(RunConfig, "trainer.lora.r") == "The rank"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.optim.learning_rate", "trainer.optim.lr"),  # what others call it
        ("trainer.optim.weight_deca", "trainer.optim.weight_decay"),
        ("lr", "trainer.optim.lr"),
        ("optim.lr", "trainer.optim.lr"),
        ("orchestrator.train.env.0.ration", "orchestrator.train.env.ratio"),
        ("orchestratr.algo", "orchestrator.algo"),
        ("zzz", None),
    ],
)
def test_an_unknown_key_names_the_nearest(wrong: str, right: str | None):
    assert nearest(RunConfig, wrong) == right
    with pytest.raises(ConfigError) as refused:
        explain(RunConfig, wrong)
    assert refused.value.key == wrong
    assert refused.value.fix is None if right is None else f" {right}?" in (refused.value.fix or "")


def test_values_of_a_resolved_file_are_found_in_every_member_of_a_list():
    tree: dict[str, Any] = {"train": {"env": [{"id": "a", "ratio": 2.0}, {"id": "b"}]}, "seed": 3}
    assert values_at(tree, "seed") == [("seed", 3)]
    assert values_at(tree, "train.env.ratio") == [("train.env.0.ratio", 2.0), ("train.env.1.ratio", None)]
    assert values_at(tree, "train.env.1.id") == [("train.env.1.id", "b")]
    assert values_at(tree, "train.env.5.id") == [("train.env.5.id", None)]
    assert values_at(tree, "absent.key") == [("absent.key", None)]
