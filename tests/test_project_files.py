"""Files for people who join: what they name exists, and what they say agrees with pyproject.toml."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from headrace import __version__
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_ci_runs_the_commands_of_the_makefile_on_every_supported_python_and_two_architectures() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    linux = jobs["linux"]
    commands = [step["run"] for step in linux["steps"] if "run" in step]
    assert commands[:2] == ["make demo", "make test"]
    subprocess.run(["make", "--dry-run", *(line.split()[1] for line in commands)], cwd=ROOT, check=True)
    versions = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)}
    assert set(linux["strategy"]["matrix"]["python"]) == versions
    assert len(linux["strategy"]["matrix"]["os"]) == 2


@pytest.mark.full
def test_all_extras_resolve_together_with_the_locked_torch() -> None:
    pin = re.search("^torch==.*$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert pin is not None
    options = ("--dry-run", "--quiet", "--no-build-isolation", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "install", *options, f"{ROOT}[all]", pin.group()], check=True)


def test_the_hooks_run_tools_of_the_lock() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    lock = (ROOT / "requirements-dev.lock").read_text()
    for hook in repository["hooks"]:
        assert f"\n{Path(hook['entry'].split()[0]).name}==" in lock


def test_the_citation_names_the_licence_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert "version" not in citation  # it is in one place


def test_the_run_file_for_newcomers_loads() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "AGENTS.md").read_text(), re.DOTALL | re.MULTILINE)
    config, notices = validate(RunConfig, tomllib.loads(text), "AGENTS.md")
    assert config.orchestrator.group_size == 8
    assert not notices


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with what the release script reads and builds, whose own checks are the command CHECK."""
    files = ("scripts/release.sh", "src/headrace/__init__.py", "CHANGELOG.md", "README.md", "LICENSE", "pyproject.toml")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changelog = (tmp_path / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(changelog.replace("(not released yet)", "(1 January 2030)"))
    (tmp_path / "Makefile").write_text("lint test-wheel:\n\t$(CHECK)\n")
    (tmp_path / ".gitignore").write_text(".venv\ndist\n")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for command in ("init -q", "config user.name a", "config user.email a@b", "add .", "commit -qm first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize("problem", ["version", "changelog", "unreleased", "changes", "tag", "user.name"])
def test_a_release_is_refused_before_anything_is_built(checkout: Path, problem: str) -> None:
    version = "9.9.9" if problem == "version" else __version__
    if problem == "changelog":
        (checkout / "CHANGELOG.md").write_text("# Changelog\n")
    elif problem == "unreleased":
        (checkout / "CHANGELOG.md").write_text(f"# Changelog\n\n## {__version__} (not released yet)\n")
    elif problem == "changes":
        (checkout / "new_file").touch()
    elif problem == "tag":
        subprocess.run(["git", "tag", f"v{__version__}"], cwd=checkout, check=True)
    elif problem == "user.name":
        subprocess.run(["git", "config", "user.name", ""], cwd=checkout, check=True)
    done = subprocess.run(["bash", "scripts/release.sh", version], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 2
    named = {"version": "9.9.9", "changes": "not committed", "tag": f"v{__version__}", "unreleased": "not released yet"}
    assert named.get(problem, problem if "." in problem else "CHANGELOG.md") in done.stderr
    assert not (checkout / "dist").exists()


@pytest.mark.parametrize("check", ["true", "false"])
def test_a_release_is_tagged_with_its_files_in_dist_only_if_the_checks_pass(checkout: Path, check: str) -> None:
    command = ["bash", "scripts/release.sh", __version__]
    done = subprocess.run(command, cwd=checkout, env={**os.environ, "CHECK": check}, capture_output=True, text=True)
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout
    files = sorted((checkout / "dist").glob("*"))
    if check == "false":
        assert (done.returncode, tags, files) == (2, "", []), done.stderr
        return
    assert (done.returncode, tags) == (0, f"v{__version__}\n"), done.stderr
    assert {path.name for path in files} == {f"headrace-{__version__}{end}" for end in (".tar.gz", "-py3-none-any.whl")}
    for path in files:
        assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" in done.stdout
