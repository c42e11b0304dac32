"""Environment variables of a run file."""

from __future__ import annotations

import os

import pytest

from headrace.config.launch import LaunchConfig, set_variables


def test_values_are_set_and_tokens_are_taken_from_the_variables_that_have_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {"MY_TOKEN": "secret", "HF_HOME": "old"})
    launch = LaunchConfig(env={"HF_HOME": "/store/hf"}, env_from={"HF_TOKEN": "MY_TOKEN"})
    assert set_variables(launch) == []
    assert os.environ == {"MY_TOKEN": "secret", "HF_HOME": "/store/hf", "HF_TOKEN": "secret"}


@pytest.mark.parametrize(("name", "exported"), [("WANDB_MODE", "disabled"), ("HF_HUB_OFFLINE", "0")])
def test_an_exported_mode_wins_over_the_run_file(name: str, exported: str, monkeypatch: pytest.MonkeyPatch):
    launch = LaunchConfig(env={name: "offline", "HF_HOME": "/store/hf"})
    monkeypatch.setattr(os, "environ", {name: exported, "HF_HOME": "old"})
    set_variables(launch)
    assert os.environ == {name: exported, "HF_HOME": "/store/hf"}
    monkeypatch.setattr(os, "environ", {name: ""})  # as good as unset
    set_variables(launch)
    assert os.environ[name] == "offline"


def test_a_missing_variable_is_a_notice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {})
    (notice,) = set_variables(LaunchConfig(env_from={"HF_TOKEN": "MY_TOKEN"}))
    assert "launch.env_from.HF_TOKEN = MY_TOKEN" in notice
    assert os.environ == {}
