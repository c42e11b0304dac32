"""`headrace demo`, `headrace examples`, `headrace env` and `headrace --version`: what Headrace comes with."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.cli.main import main

ROOT = Path(__file__).parents[2]


def test_the_demo_is_the_example_with_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    resolved = []
    for command in (["demo"], ["rl", str(ROOT / "examples/reverse-text/rl.toml")]):
        assert main([*command, "--max_steps", "5", "--dry-run"]) == 0
        resolved.append(tomllib.loads(capsys.readouterr().out))
    assert resolved[0] == resolved[1]
    assert resolved[0]["max_steps"] == 5


def test_every_example_is_listed_with_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    run_files = subprocess.run(
        ["git", "ls-files", "*.toml", "*.yaml"], cwd=ROOT / "examples", capture_output=True, text=True, check=True
    ).stdout.split()
    assert listed.keys() == set(run_files)
    assert not any(text.startswith("#") for text in listed.values())


def test_examples_are_copied_and_never_over_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "examples"
    assert main(["examples", "--copy", str(target)]) == 0
    copied = target / "custom-algorithm" / "rl.toml"
    assert copied.read_bytes() == (ROOT / "examples" / "custom-algorithm" / "rl.toml").read_bytes()
    copied.write_text("mine")
    assert main(["examples", "--copy", str(target)]) == 2
    assert copied.read_text() == "mine"


SECRET = "hunter2"


def test_a_report_has_versions_and_no_secrets(tmp_path: Path) -> None:
    secrets = {
        "HF_TOKEN": f"hf_{SECRET}",
        "OPENAI_API_KEY": f"sk-{SECRET}",
        "HEADRACE_API_KEY": SECRET,
        "WANDB_API_KEY": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "HTTPS_PROXY": f"http://user:{SECRET}@proxy:3128",
        "PIP_INDEX_URL": f"https://user:{SECRET}@index/simple",
        "CUDA_VISIBLE_DEVICES": f"/run/{SECRET}",  # a name that is shown, with a value that is not a list of devices
        "NCCL_DEBUG": f"http://{SECRET}@host",
        "HEADRACE_CACHE": str(tmp_path / SECRET),
        "HOME": str(tmp_path / SECRET),
        "OMP_NUM_THREADS": "1",
    }
    folder = tmp_path / f"project-{SECRET}"
    folder.mkdir()
    (folder / ".env").write_text(f"KEY={SECRET}\n")
    command = [sys.executable, "-m", "headrace", "env"]
    done = subprocess.run(command, env=os.environ | secrets, cwd=folder, capture_output=True, text=True, check=True)
    assert SECRET not in done.stdout + done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  "))
    assert {"headrace", "python", "torch", "cuda", "transformers", "vllm", "memory", "cores", "pydantic"} <= rows.keys()
    assert rows["OMP_NUM_THREADS"] == "1"


def test_the_versions_of_torch_and_cuda_are_what_torch_says() -> None:
    torch = pytest.importorskip("torch")
    command = [sys.executable, "-m", "headrace", "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert versions["torch"] == torch.__version__
    assert versions["cuda"].startswith(torch.version.cuda or "none")
