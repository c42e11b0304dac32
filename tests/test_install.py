"""How Headrace, vLLM for CPUs and Ray are installed: one set of versions, no GPU builds, explained failures."""

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/install.py, which makes no environment."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "create", lambda environment: None)
    return module


def test_where_pip_knows_no_cpu_build_of_torch_it_says_what_pip_needs(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pip(environment: Path, *arguments: str) -> None:
        raise install.InstallError("ERROR: No matching distribution found for torch==2.13.0+cpu")

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(
        install.InstallError, match=r"found for torch==2\.13\.0\+cpu\n.* Give pip a source .*EXTRA_INDEX_URL"
    ):
        install.install_vllm(tmp_path)


def test_systems_other_than_linux_are_refused(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(install.InstallError, match="for Linux alone"):
        install.install_vllm(tmp_path)
    with pytest.raises(install.InstallError, match="for Linux alone"):
        install.install_triton(tmp_path / "runtime", tmp_path)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("given", "hidden"), [([], True), (["VLLM_PYTHON=/their/python"], False)])
def test_the_vllm_for_cpus_sees_no_gpu(given: list[str], hidden: bool) -> None:
    output = subprocess.run(
        ["make", "--dry-run", "test-vllm", *given], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert ("CUDA_VISIBLE_DEVICES= HEADRACE_VLLM_PYTHON=" in output) == hidden
    assert "pytest tests/vllm" in output


@pytest.mark.parametrize("lock", ["RAY_LOCK", "TRITON_LOCK", "VIEW_LOCK"])
def test_an_environment_beside_the_runtime_sees_its_packages_and_has_no_torch_of_its_own(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lock: str
) -> None:
    own, shared = (tmp_path / name / "lib" / "python3.12" / "site-packages" for name in ("beside", "runtime"))
    for folder in (own, shared):
        folder.mkdir(parents=True)
    (shared / "only_in_the_runtime.py").touch()
    monkeypatch.setattr(install, "pip", lambda environment, *arguments: None)
    monkeypatch.setattr(install, "run", lambda environment, *arguments: "version 0\n")
    install.install_beside(tmp_path / "runtime", tmp_path / "beside", getattr(install, lock), "package")
    code = f"import site; site.addsitedir({str(own)!r}); import only_in_the_runtime"
    subprocess.run([sys.executable, "-c", code], check=True)
    packages = set(install.locked(getattr(install, lock)))
    assert not {"torch", "headrace"} & packages
    assert not packages & set(install.locked(install.RUNTIME_LOCK))


def test_the_locked_versions_satisfy_all_extras_together(install: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locks = [install.locked(getattr(install, f"{name}_LOCK")) for name in ("RUNTIME", "DEV", "RAY", "TRITON", "VIEW")]
    versions = {name: version for lock in locks for name, version in lock.items()}
    assert all(lock[name] == versions[name] for lock in locks for name in lock)
    extras = project["optional-dependencies"]
    (everything,) = map(Requirement, extras.pop("all"))
    del extras["client-tests"]  # in an environment of their own
    unlocked = {"trackio"}
    assert everything.extras == extras.keys() - {"dev", "triton-tests", "view-tests"}
    for text in chain(project["dependencies"], *extras.values()):
        requirement = Requirement(text)
        assert requirement.name in unlocked or requirement.specifier.contains(versions[requirement.name]), text
