"""The Containerfile: checked as text, its health check, and, with buildah as root, built and run."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = re.sub(r"\\\n", " ", (ROOT / "Containerfile").read_text()).splitlines()
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]
MAX_CPU_IMAGE_BYTES = 1_500_000_000


def stages() -> dict[str, list[tuple[str, ...]]]:
    """Return the instructions of each stage, with those that it inherits from an earlier one."""
    found: dict[str, list[tuple[str, ...]]] = {}
    name = ""
    for instruction, text in INSTRUCTIONS:
        if instruction == "FROM":
            parent, name = text.split(" AS ")
            found[name] = list(found.get(parent, ()))
        elif name:
            found[name].append((instruction, text))
    return found


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_the_demo_without_root_and_has_a_health_check(target: str) -> None:
    last = dict(stages()[target])  # the last of each instruction counts
    assert last["USER"] == "10001"  # a number: a cluster can check that it is not root
    assert json.loads(last["CMD"]) == ["headrace", "demo"]
    assert "/opt/health.py" in last["HEALTHCHECK"]


def test_vllm_has_an_environment_of_its_own() -> None:
    steps = [text for name, text in stages()["cuda-environment"] if name == "RUN"]
    assert any('/opt/vllm/bin/pip install --no-cache-dir ${PIP_ARGS} "${VLLM}"' in text for text in steps)
    assert {text.split()[-1] for name, text in stages()["cuda"] if "--from" in text} == {"/opt/headrace", "/opt/vllm"}


def test_everything_that_is_copied_exists_and_reaches_the_build() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = {
        word for name, text in INSTRUCTIONS if name == "COPY" and "--from" not in text for word in text.split()[:-1]
    }
    for source in sources - {"dist*/"}:  # may be missing
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source


@pytest.mark.parametrize(
    ("state", "age_s", "status"), [("running", 5, 0), ("running", 600, 1), ("finished", 600, 0), ("failed", 5, 1)]
)
def test_a_container_is_healthy_while_its_run_makes_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, age_s: float, status: int
) -> None:
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    heartbeat = {"time": time.time() - age_s, "state": state}
    (tmp_path / "outputs" / "run" / "heartbeat.json").write_text(json.dumps(heartbeat))
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path(str(ROOT / "scripts" / "container_health.py"))["main"]() == status


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("buildah") and shutil.which("mmdebstrap")),
    reason="needs root, buildah and mmdebstrap",
)
def test_the_cpu_image_is_built_from_a_debian_tree_and_trains(tmp_path: Path) -> None:
    storage = ["--root", str(tmp_path / "storage"), "--runroot", str(tmp_path / "runroot")]

    def buildah(*arguments: str) -> str:
        done = subprocess.run(
            ["buildah", *storage, *arguments],
            env=os.environ | {"BUILDAH_ISOLATION": "chroot"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()

    subprocess.run(["mmdebstrap", "-q", "--variant=minbase", "bookworm", str(tmp_path / "base.tar")], check=True)
    container = buildah("from", "scratch")
    buildah("add", container, str(tmp_path / "base.tar"), "/")
    buildah("commit", "--rm", container, "localhost/base")
    context = tmp_path / "context"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        if name.startswith(("src/", "examples/", "scripts/")) or "/" not in name:
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, context / name)
    torch = re.search("^torch==.*$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert torch is not None
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(context / "dist")]
    subprocess.run([*download, f"{torch.group()}+cpu"], check=True)
    others = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line != torch.group()]
    (tmp_path / "others.txt").write_text("\n".join(others))
    subprocess.run([*download, "-r", str(tmp_path / "others.txt")], check=True)
    settings = ["--build-arg", "BASE=localhost/base", "--build-arg", "PIP_ARGS=--no-index"]
    buildah("build", "--format", "docker", "--target", "cpu", "-t", "headrace:cpu", *settings, str(context))

    described = json.loads(buildah("inspect", "--type", "image", "headrace:cpu"))["Docker"]["config"]
    assert described["User"] == "10001"
    assert described["Cmd"] == ["headrace", "demo"]
    assert described["Healthcheck"]["Test"][-1] == "/opt/health.py"
    container = buildah("from", "headrace:cpu")
    tree = Path(buildah("mount", container))
    size = subprocess.run(["du", "-s", "--block-size=1", str(tree)], stdout=subprocess.PIPE, check=True).stdout
    print(f"the image has {int(size.split()[0]) / 1e9:.2f} GB")
    assert int(size.split()[0]) < MAX_CPU_IMAGE_BYTES
    assert buildah("run", container, "--", "id", "-u") == "10001"
    buildah("run", container, "--", *described["Cmd"], "--max_steps", "3")
    assert (tree / "workspace" / "outputs" / "reverse-text" / "model" / "model.safetensors").is_file()
    buildah("run", container, "--", *described["Healthcheck"]["Test"][1:])
    buildah("rm", container)
