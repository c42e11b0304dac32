"""What docs/how-to/serving.md shows is what runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.serve import greeting
from headrace.config.inference import HttpConfig, InferenceConfig
from headrace.errors import AGAIN
from headrace.inference.backend import (
    AdminTimeout,
    EngineError,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
)
from headrace.inference.keys import Forbidden, Unauthorized
from headrace.inference.server.app import App
from headrace.inference.server.replies import error_reply
from headrace.inference.server.request_bodies import TooLarge, TooSlow
from headrace.inference.weights.reading import WeightsUnreachable
from headrace.tools.chat import HELP, SETTINGS
from tests.cli.chat_stand_in import chat_stand_in

REPOSITORY = Path(__file__).parents[2]
DOCS = (REPOSITORY / "docs" / "how-to/serving.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOCS, re.DOTALL | re.MULTILINE)


def cells(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    table = re.search(r"^\|.*?\n\n", DOCS.partition(heading)[2] + "\n\n", re.DOTALL | re.MULTILINE)
    assert table is not None
    rows = table.group().strip().splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_greeting_is_what_a_server_says():
    (shown,) = [text for _, text in BLOCKS if text.startswith("$ headrace serve")]
    assert shown.partition("\n")[2] == greeting("http://127.0.0.1:8000", None) + "\n"


def test_the_python_example_prints_the_reply(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("openai")
    program, structured = [text for language, text in BLOCKS if language == "python"]
    with chat_stand_in() as server:
        server.models = [{"id": "small", "object": "model", "created": 0, "owned_by": "us"}]
        names: dict[str, Any] = {}
        exec(program.replace("http://127.0.0.1:8000", server.url), names)
        exec(structured, names)
    assert capsys.readouterr().out == "Hello."
    assert [sorted(asked) for asked in server.asked[1:]] == [
        ["messages", "model", "response_format"],
        ["messages", "model", "structured_outputs"],
    ]


def test_the_routes_are_those_of_the_server_with_the_keys_they_want():
    keys = {"anyone": "none", "client": "client", "admin": "admin"}
    source = inspect.getsource(App.asgi)
    served = re.findall(r'"(/[^"]+)": \("(\w+)", "(client|admin|anyone)", ', source)
    ours = {(f"`{method} {path.replace('{name:path}', 'NAME')}`", keys[access]) for path, method, access in served}
    assert {(row[0], row[1]) for row in cells("## Routes")} == ours
    assert len(ours) > 10


def test_the_variables_are_the_defaults():
    config = InferenceConfig()
    assert [row[0].strip("`") for row in cells("## Keys")] == [config.api_key_var, config.admin_key_var]


@pytest.mark.parametrize("row", cells("## Settings"), ids=lambda row: row[0])
def test_every_setting_is_a_key_with_this_default(row: list[str]):
    key, default = row[0].strip("`"), InferenceConfig.model_fields[row[0].strip("`")].default
    if isinstance(default, bool):
        assert row[1] == str(default).lower()
    elif default is not None:
        assert row[1].strip("`") == (default if isinstance(default, str) else f"{default:g}"), key


def test_every_limit_of_connections_is_a_key_with_this_default():
    shown = {row[0].strip("`"): float(row[1]) for row in cells("## Slow and many clients")}
    assert {key: getattr(HttpConfig(), key) for key in shown} == shown


def test_the_statuses_are_what_such_errors_are_answered_with():
    errors = (
        InvalidRequest(""),
        Unauthorized(),
        Forbidden(),
        ModelNotFound(),
        TooSlow(),
        TooLarge(),
        EngineOverloaded(""),
        EngineError(""),
        WeightsUnreachable(""),
        EngineStopped(""),
        AdminTimeout(""),
    )
    statuses = [error_reply(error).status_code for error in errors]
    assert [int(row[0]) for row in cells("## What goes wrong")] == statuses
    assert "retry-after" in error_reply(EngineOverloaded("")).headers
    assert f"exit status {AGAIN}" in DOCS.replace("\n  ", " ")


def test_the_commands_of_a_chat_are_those_of_its_help():
    listed = {row[0].strip("`").split()[0] for row in cells("## Chat")}
    assert listed == set(re.findall(r"^/\w+", HELP, re.MULTILINE))
    (settings,) = [row[1] for row in cells("## Chat") if row[0].startswith("`/set")]
    assert set(re.findall(r"`(\w+)`", settings)) == {*SETTINGS, "default"}
