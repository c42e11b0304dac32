"""trackio as a monitor, with the real package in an environment of its own: it wants an older pillow than the tests."""

import json
import os
import subprocess
import sys
import venv
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.monitors import TensorboardConfig, TrackioConfig, WandbConfig
from headrace.launch import checks
from headrace.observe.histograms import count
from headrace.observe.metrics import MetricsLog
from headrace.observe.monitors import MonitorError, forwarding
from headrace.transport.run_dir import RunDir

FORWARD = """
import sys
from pathlib import Path
from headrace.config.monitors import TrackioConfig
from headrace.observe.monitors import forwarding
from headrace.transport.run_dir import RunDir
with forwarding(RunDir(Path(sys.argv[1])), None, None, TrackioConfig(project="p")):
    pass
"""
READ = """
import json
import trackio
(run,) = trackio.Api().runs("p")
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("p", run.name)))
"""
BLOCKED = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")


def test_a_missing_package_is_refused_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setenv("TRACKIO_DIR", "")
    with pytest.raises(MonitorError) as refused, forwarding(RunDir(tmp_path), None, None, TrackioConfig()):
        pass
    assert refused.value.key == "[trackio]" and "headrace[trackio]" in str(refused.value)


@pytest.mark.parametrize("leftover", [None, ModuleSpec("a folder", None)])
@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_run_without_the_package_is_refused_before_it_starts(
    name: str, leftover: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    sections: dict[str, Any] = {"tensorboard": TensorboardConfig(), "trackio": TrackioConfig(), "wandb": WandbConfig()}
    subject: Any = SimpleNamespace(config=SimpleNamespace(**sections, otel=None))
    installed = ModuleSpec("a package", None, origin="__init__.py")
    monkeypatch.setattr(checks, "find_spec", lambda package: leftover if package == name else installed)
    (problem,) = checks.check_monitors(subject)
    assert problem.key == f"[{name}]" and f"headrace[{name}]" in str(problem)
    assert checks.check_monitors in checks.CHECKS  # of --dry-run, too
    if name == "wandb":
        monkeypatch.setenv("WANDB_MODE", "disabled")
        assert list(checks.check_monitors(subject)) == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_numbers_and_histograms_reach_the_database_without_network(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.EnvBuilder(with_pip=True).create(environment)
    python = environment / "bin" / "python"
    install = subprocess.run([python, "-m", "pip", "install", "-q", "trackio>=0.43"], capture_output=True, text=True)
    if install.returncode:
        pytest.skip(f"trackio cannot be installed here: {install.stderr[-300:]}")
    (packages,) = environment.glob("lib/python3.*/site-packages")
    shared = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "runtime.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    assert not (packages / "torch").exists() and not (packages / "gradio").exists()

    run = RunDir(tmp_path / "my-run")
    log = MetricsLog(run.metrics, "trainer")
    variables = {**os.environ, **BLOCKED, "TRACKIO_DIR": str(run.root / "trackio")}
    for step in (1, 2):  # the second process continues the run of the first
        log.log(step, {"loss": step / 4, "histogram/ratio": count("ratio", [1.0, 1.5]).encode()})
        subprocess.run([python, "-c", FORWARD, run.root], env=variables, check=True, timeout=120)
    shown = subprocess.run([python, "-c", READ], env=variables, check=True, timeout=120, capture_output=True, text=True)
    logs = json.loads(shown.stdout.splitlines()[-1])
    assert [(entry["step"], entry["loss"]) for entry in logs if "loss" in entry] == [(1, 0.25), (2, 0.5)]
    histograms = [entry["ratio"] for entry in logs if "ratio" in entry]
    assert [sum(histogram["values"]) for histogram in histograms] == [2, 2]
