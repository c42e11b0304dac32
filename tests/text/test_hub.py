"""Where a model's files are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.text.hub import ModelNotFound, model_directory


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert model_directory(str(tmp_path)) == tmp_path


def test_a_directory_that_is_no_model_says_what_is_missing(tmp_path: Path):
    with pytest.raises(ModelNotFound) as failure:
        model_directory(str(tmp_path))
    assert failure.value.value == tmp_path
    assert "config.json" in failure.value.fact


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "../model", "~/no-such-model", "a/b/c", "tiny"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name: str):
    with pytest.raises(ModelNotFound) as failure:
        model_directory(name)
    assert failure.value.value == name


def test_a_file_is_no_model(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        model_directory(str(path))


@pytest.mark.parametrize("name", ["outputs/my run", "a/b?"])
def test_what_cannot_be_a_hub_name_is_refused_by_name(name: str):
    with pytest.raises(ModelNotFound) as failure:
        model_directory(name)
    assert name in str(failure.value)


def test_an_unreachable_hub_is_an_error_that_names_the_model(tmp_path: Path):
    # in a process of its own: the hub's library reads these variables when it is imported
    code = (
        "from headrace.text.hub import ModelNotFound, model_directory\n"
        "try: model_directory('no-one/no-such-model')\n"
        "except ModelNotFound as error: print(error.value, error.fix)"
    )
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no-one/no-such-model ")
    assert "hub" in done.stdout
