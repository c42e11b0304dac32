"""Fixtures that several rooms share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model directory with random weights."""
    from headrace.trainer.tiny import write_tiny_model

    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory)
    return directory
