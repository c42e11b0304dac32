"""Who may read a run through the page, and what a browser is allowed to do with it."""

import os
import shutil
from pathlib import Path

import pytest

from headrace.errors import BadInput
from headrace.tools.view.routes import ROUTES
from headrace.tools.view.runs import RunFolder
from headrace.tools.view.server import page_files
from tests.tools.view.client import PORT, RECORDED, TOKEN, browser, run_id, stranger

PATHS = ["/", "/api/runs", "/api/settings", "/static/page.js", "/api/runs/34aef458a17f", "/static/index.html"]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_served_without_the_cookie(path: str):
    assert stranger(RECORDED).get(path).status_code == 403


def test_the_token_is_exchanged_for_a_strict_cookie_and_leaves_the_address():
    answer = stranger(RECORDED).get("/", params={"token": TOKEN}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in cookie


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", "é"])
def test_another_token_is_refused(token: str):
    answer = stranger(RECORDED).get("/", params={"token": token}, follow_redirects=False)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


def test_a_cookie_of_another_server_is_refused():
    other, client = browser(), stranger(RECORDED)
    client.cookies.update(other.cookies)
    assert client.get("/api/runs").status_code == 403


@pytest.mark.parametrize("host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1:1", "127.0.0.1", ""])
def test_another_name_in_the_host_header_is_refused(host: str):
    client = browser()
    assert client.get("/api/runs").status_code == 200
    assert client.get("/api/runs", headers={"host": host}).status_code == 403
    assert client.get("/", params={"token": TOKEN}, headers={"host": host}).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(method: str):
    assert browser().request(method, "/api/runs").status_code == 405


def test_every_answer_forbids_foreign_scripts_frames_and_caches():
    client = browser()
    for answer in (client.get("/api/runs"), client.get("/"), client.get("/api/runs/none"), stranger(RECORDED).get("/")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers


ESCAPES = ["..", "../rl", "..%2frl", "%2e%2e%2frl", "/etc", "%00", "rl", "..%5crl", "a" * 5000]


@pytest.mark.parametrize("escape", ESCAPES)
def test_no_part_of_a_path_reaches_the_file_system(escape: str, tmp_path: Path):
    secret = tmp_path / "secret"
    shutil.copytree(RECORDED / "rl", secret)
    shutil.copytree(RECORDED / "sft", tmp_path / "open" / "sft")
    client = browser(tmp_path / "open")
    known = run_id(client, "sft")
    for route in ROUTES:
        for place in ("{run}", "{step:int}", "{row:int}", "{draw:int}", "{before:int}", "{after:int}"):
            if place in route:
                path = route.replace(place, escape)
                path = path.replace("{run}", known)
                for other in ("{step:int}", "{row:int}", "{draw:int}", "{before:int}", "{after:int}"):
                    path = path.replace(other, "4")
                answer = client.get(path)
                shortened = answer.request.url.path != path  # the client itself resolves `..`
                assert answer.status_code in (400, 404) or shortened, path
                assert b"reverse-text" not in answer.content


@pytest.mark.parametrize("name", ["../server.py", "..%2fserver.py", "%2e%2e/__init__.py", "/etc/passwd", "vendor/"])
def test_only_files_of_the_page_are_static(name: str):
    assert browser().get(f"/static/{name}").status_code == 404


def test_the_page_needs_nothing_from_elsewhere():
    for name, content in page_files().items():
        if name.endswith((".html", ".css")):
            assert b"http://" not in content, name
            assert b"https://" not in content, name


def test_links_and_hidden_folders_are_not_followed(tmp_path: Path):
    shutil.copytree(RECORDED / "sft", tmp_path / "open" / "sft")
    shutil.copytree(RECORDED / "rl", tmp_path / "open" / ".hidden" / "rl")
    shutil.copytree(RECORDED / "rl", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "open" / "link")
    assert [run.name for run in RunFolder(tmp_path / "open").runs().values()] == ["sft"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadInput, match=str(path)):
            RunFolder(path)
