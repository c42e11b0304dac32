"""Where the engine listens."""

import json
from pathlib import Path

import pytest

from headrace.rollout.batch import SCHEMA, SchemaError
from headrace.transport.endpoint import Endpoint, read_endpoint, write_endpoint


def test_an_endpoint_is_read_back(tmp_path: Path):
    write_endpoint(tmp_path / "endpoint.json", Endpoint("http://127.0.0.1:8000", 17))
    assert read_endpoint(tmp_path / "endpoint.json") == Endpoint("http://127.0.0.1:8000", 17)


def test_there_is_no_endpoint_before_the_server_listens(tmp_path: Path):
    assert read_endpoint(tmp_path / "endpoint.json") is None


def test_an_endpoint_of_a_newer_schema_is_refused(tmp_path: Path):
    path = tmp_path / "endpoint.json"
    path.write_text(json.dumps({"schema": SCHEMA + 1, "socket": "elsewhere"}))
    with pytest.raises(SchemaError, match=r"endpoint\.json has schema 2"):
        read_endpoint(path)
