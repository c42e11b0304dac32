"""The page as files that open without a server: `headrace view RUN --export DIR`.

A browser lets a page from `file://` load scripts but neither fetch files nor import modules. So every answer is a
script that hands its JSON to the page, and `static/page.js` begins with their list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from starlette.routing import compile_path

from headrace.errors import BadInput
from headrace.tools.view.rollouts import step_list
from headrace.tools.view.routes import ROUTES
from headrace.tools.view.runs import RunFolder, ViewedRun, saved_files
from headrace.tools.view.server import page_files
from headrace.transport.run_dir import RolloutKind

MAX_STEPS = 20
"""Steps of a run whose rollouts are exported: the newest ones, and those with exported tokens."""
MAX_EVALUATIONS = 4
"""Evaluated versions whose episodes are exported: the first and the newest."""

_PATTERNS = [(compile_path(path), answer) for path, answer in ROUTES.items()]


def export(folder: RunFolder, target: Path) -> int:
    """Write the page and its data; return the number of files. The directory must be new or empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        fact, fix = "exists and is not an empty directory", "Name a new directory."
        raise BadInput(fact, key="--export", value=target, fix=fix)
    (target / "data").mkdir(parents=True, exist_ok=True)
    paths = []
    for path in dict.fromkeys(exported_paths(folder)):
        name = re.sub("[^A-Za-z0-9]+", "-", path.removeprefix("/api/"))
        script = b"HEADRACE.receive(" + script_json(path) + b", " + script_json(answer_to(folder, path)) + b");\n"
        (target / "data" / f"{name}.js").write_bytes(script)
        paths.append(path)
    static = page_files(b'window.HEADRACE = {mode: "export", exported: ' + script_json(paths) + b"};\n")
    for name, content in static.items():
        file = target / name if name == "index.html" else target / "static" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return len(paths) + len(static)


def exported_paths(folder: RunFolder) -> Iterator[str]:
    yield from ("/api/runs", "/api/settings")
    for id, run in folder.runs().items():
        base = f"/api/runs/{id}"
        yield from (base, f"{base}/series", f"{base}/lanes", f"{base}/histograms")
        saved = saved_files(run)
        for step in sorted({*saved["steps"][-MAX_STEPS:], *set(saved["steps"]).intersection(saved["token_steps"])}):
            yield f"{base}/steps/{step}"
            listed = step_list(run, RolloutKind.TRAIN, step)
            for row in _rows(listed):
                yield from (f"{base}/steps/{step}/rollouts/{row}", f"{base}/steps/{step}/rollouts/{row}/credit")
            if run.dir.journal.is_file():
                yield from (f"{base}/draws/{group['draw']}" for group in listed["groups"])
        if run.dir.journal.is_file():
            yield f"{base}/draws"
        yield from _evaluation_paths(run, f"{base}/evaluation")


def _evaluation_paths(run: ViewedRun, base: str) -> Iterator[str]:
    yield base
    versions = saved_files(run)["eval_steps"]
    versions = sorted({*versions[:1], *versions[1:][-MAX_EVALUATIONS:]})
    pairs = {*pairwise(versions), *zip(versions[:1], versions[-1:], strict=True)} if len(versions) > 1 else set()
    yield from (f"{base}/{before}/{after}" for before, after in sorted(pairs))
    for version in versions:
        listed = step_list(run, RolloutKind.EVAL, version)
        yield from (f"{base}/{version}/rollouts/{row}" for row in _rows(listed))


def _rows(listed: dict[str, Any]) -> Iterator[int]:
    """Yield the rows of a step, group by group: a group is read once."""
    for group in listed["groups"]:
        yield from group["rows"]


def answer_to(folder: RunFolder, path: str) -> Any:
    """Return the answer of a path without a query."""
    for (pattern, _, converters), answer in _PATTERNS:
        if match := pattern.match(path):
            parameters = {name: converters[name].convert(value) for name, value in match.groupdict().items()}
            return answer(folder, parameters, {})
    raise LookupError(path)


def script_json(content: Any) -> bytes:
    """Return JSON that is also valid in a script of any page: no character could end it."""
    text = msgspec.json.encode(content)
    return text.replace(b"<", b"\\u003c").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
