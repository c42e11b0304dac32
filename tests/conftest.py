"""Fixtures that several rooms share."""

import logging
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from headrace.machine import frozen_imports


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude what all test files import from garbage collections: a million objects that stay until the end."""
    with frozen_imports():
        return (yield)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that run in the tests' own process set up logging for all of it."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model directory with random weights."""
    from headrace.trainer.tiny import write_tiny_model

    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory)
    return directory
