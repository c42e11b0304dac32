"""Where the engine listens."""

import json
import os
import stat
from pathlib import Path

import pytest

from headrace.errors import BadInput
from headrace.rollout.schema import SCHEMA, SchemaError
from headrace.transport.endpoint import (
    Endpoint,
    new_endpoint_path,
    read_endpoint,
    read_endpoints,
    withdraw_endpoint,
    withdraw_endpoints,
    write_endpoint,
)
from tests.refusals import refused


def test_an_endpoint_is_read_back(tmp_path: Path):
    write_endpoint(tmp_path / "endpoint.json", Endpoint("http://127.0.0.1:8000", 17))
    assert read_endpoint(tmp_path / "endpoint.json") == Endpoint("http://127.0.0.1:8000", 17)


def test_an_endpoint_has_the_keys_of_its_server_and_does_not_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    endpoint = Endpoint("http://127.0.0.1:8000", 17, api_key="door", admin_key="desk")
    assert repr(endpoint) == str(endpoint) == "Endpoint('http://127.0.0.1:8000', 17)"
    path, modes = tmp_path / "inference.json", []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    before = os.umask(0)
    try:
        write_endpoint(path, endpoint)
    finally:
        os.umask(before)
    assert modes[0] == stat.S_IMODE(path.stat().st_mode) == 0o600  # while it was written, and now
    assert read_endpoint(path) == endpoint


def test_there_is_no_endpoint_before_the_server_listens(tmp_path: Path):
    assert read_endpoint(tmp_path / "endpoint.json") is None


def test_an_endpoint_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    path = tmp_path / "inference.json"
    write_endpoint(path, Endpoint("http://127.0.0.1:8000", 17))
    monkeypatch.setattr(Path, "read_bytes", deny)  # the user of the tests may be root
    with refused(BadInput, file=tmp_path / "inference.json"):
        read_endpoints(tmp_path)


def test_an_endpoint_of_a_newer_schema_is_refused(tmp_path: Path):
    path = tmp_path / "endpoint.json"
    path.write_text(json.dumps({"schema": SCHEMA + 1, "socket": "elsewhere"}))
    with pytest.raises(SchemaError, match=r"endpoint\.json.*\b2\b"):
        read_endpoint(path)


def test_every_server_of_a_run_is_found_by_its_name(tmp_path: Path):
    assert read_endpoints(tmp_path / "none") == {}
    first, second = Endpoint("http://127.0.0.1:8000", 17), Endpoint("http://127.0.0.1:8001", 18)
    write_endpoint(tmp_path / "inference.json", first)
    write_endpoint(tmp_path / "inference-1.json", second)
    assert read_endpoints(tmp_path) == {"inference": first, "inference-1": second}


def test_every_start_of_a_server_has_an_endpoint_of_its_own_and_a_server_withdraws_only_that(tmp_path: Path):
    old, new, other = (new_endpoint_path(tmp_path, name) for name in ("inference", "inference", "inference-1"))
    for path in (old, new, other):
        write_endpoint(path, Endpoint("http://127.0.0.1:8000", 17))
    withdraw_endpoint(old)
    withdraw_endpoint(old)
    assert set(read_endpoints(tmp_path)) == {new.stem, other.stem}


def test_all_endpoints_of_a_dead_server_are_withdrawn(tmp_path: Path):
    other = new_endpoint_path(tmp_path, "inference-1")
    ours = [new_endpoint_path(tmp_path, "inference"), new_endpoint_path(tmp_path, "inference")]
    for path in (tmp_path / "inference.json", *ours, other):
        write_endpoint(path, Endpoint("http://127.0.0.1:8000", 17))
    withdraw_endpoints(tmp_path, "inference")
    assert set(read_endpoints(tmp_path)) == {other.stem}
