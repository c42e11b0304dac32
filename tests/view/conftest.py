"""A real Chromium on pages of `headrace view`: every page must be free of errors and stay on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.end_to_end.test_recorded_runs import copy_recorded_runs
from tests.view.hostile_run import add_hostile_run

PAGE_TIMEOUT_S = 60
"""For one page on a loaded machine; no test asserts a time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, help="write pictures of the main pages to this folder")
    parser.addoption("--pictured", type=Path, help="the folder of runs on the pictures [recorded ones]")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is in .venv-view: run `make test-view`")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        # Chromium refuses its sandbox to root; these pages are our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose test fails on an error in the console, and on a request that leaves this machine."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(PAGE_TIMEOUT_S * 1000)
    page = context.new_page()
    errors: list[str] = []
    requests: set[str] = set()

    def note(message: Any) -> None:
        # Chromium drops requests when an interface of the machine comes or goes; the page has to ask again.
        if message.type in ("error", "warning") and "ERR_NETWORK_CHANGED" not in message.text:
            errors.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}") or dialog.dismiss())
    page.on("request", lambda request: requests.add(request.url))
    page.errors = errors
    yield page
    context.close()
    assert errors == []
    assert {urlsplit(url).hostname for url in requests} <= {"127.0.0.1", None, ""}


View = Callable[[Path], str]


@pytest.fixture(scope="session")
def view() -> Iterator[View]:
    """Start `headrace view PATH` and return its URL."""
    servers: list[subprocess.Popen[str]] = []

    def start(path: Path) -> str:
        command = [sys.executable, "-m", "headrace", "view", str(path), "--no-browser"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        servers.append(server)
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), url
        return url

    yield start
    for server in servers:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded runs, and one whose names and texts are hostile."""
    folder = copy_recorded_runs(tmp_path_factory.mktemp("view") / "recorded")
    add_hostile_run(folder)
    return folder


@pytest.fixture(scope="session")
def recorded_url(view: View, recorded: Path) -> str:
    return view(recorded)


class Browsing:
    """What a test does on a page."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        page.goto(url)
        self.settle()

    def settle(self) -> None:
        """Wait until nothing is loading any more."""
        self.page.wait_for_selector("h1, .error")
        self.wait("document.querySelectorAll('.loading').length === 0")

    def wait(self, condition: str, argument: object = None, timeout_s: float = PAGE_TIMEOUT_S) -> None:
        """Wait until an expression is true. Playwright's own wait needs `eval`, which the page forbids."""
        deadline = time.monotonic() + timeout_s
        while not self.page.evaluate(condition, argument):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(50)

    def go(self, *parts: object) -> None:
        """Open a page of a run by its route."""
        self.page.evaluate("route => { location.hash = route }", "#/" + "/".join(map(str, parts)))
        self.page.wait_for_timeout(50)
        self.settle()

    def run_id(self, name: str) -> str:
        runs = self.page.evaluate("fetch('api/runs').then(response => response.json())")["runs"]
        return next(run["id"] for run in runs if run["name"] == name)

    def text(self, selector: str = "main") -> str:
        return self.page.inner_text(selector)


@pytest.fixture
def browsing(page: Any, recorded_url: str) -> Browsing:
    return Browsing(page, recorded_url)
