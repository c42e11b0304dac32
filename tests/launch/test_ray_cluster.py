"""What is asked of a Ray cluster, and how a wrong address is refused. Without Ray."""

import socket
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import BAD_INPUT
from headrace.launch.errors import BadRequest
from headrace.launch.hosts.ray_cluster import ADDRESS_KEY, check_address, describe_shortage, make_bundles
from headrace.machine import CACHE_VARIABLE
from tests.end_to_end.runs import REPOSITORY

LARGE = {"CPU": 64.0, "GPU": 8.0, "memory": 1e12}
SMALL = {"CPU": 32.0, "GPU": 4.0}
HEAD = {"CPU": 0.0, "GPU": 8.0}
PLAIN = {"CPU": 16.0}


@pytest.mark.parametrize(
    ("nodes", "count", "gpus_per_node", "expected"),
    [
        pytest.param([SMALL, LARGE, SMALL], 2, None, [8, 4], id="the largest hosts first"),
        pytest.param([HEAD, SMALL], 1, None, [4], id="a head without CPUs takes no work"),
        pytest.param([LARGE, SMALL], 2, 4, [4, 4], id="as many GPUs as are set"),
        pytest.param([PLAIN, PLAIN], 2, None, [0, 0], id="hosts without GPUs"),
        pytest.param([SMALL], 3, None, [4, 4, 4], id="hosts that are yet to come are like the largest"),
        pytest.param([], 2, None, [0, 0], id="an empty cluster"),
    ],
)
def test_a_bundle_takes_the_gpus_of_its_host(nodes, count, gpus_per_node, expected):
    bundles = make_bundles(nodes, count, gpus_per_node)
    assert [bundle.get("GPU", 0) for bundle in bundles] == expected
    assert all(bundle["CPU"] == 1 for bundle in bundles)


def test_a_shortage_names_each_host_of_the_cluster_and_what_is_free():
    nodes = [{"NodeManagerHostname": "a1", "Resources": SMALL}, {"NodeManagerHostname": "b2", "Resources": PLAIN}]
    sentence = describe_shortage(make_bundles([SMALL, PLAIN], 3, 8), nodes, {"CPU": 3.0})
    for part in ("3 with 8 GPUs", "a1 (32 CPUs, 4 GPUs)", "b2 (16 CPUs, 0 GPUs)", "Free: 3 CPUs, 0 GPUs"):
        assert part in sentence


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "http://127.0.0.1:8265"])
def test_an_address_that_is_not_that_of_a_cluster_is_refused(address: str):
    with pytest.raises(BadRequest) as caught:
        check_address(address)
    assert (caught.value.key, caught.value.value) == (ADDRESS_KEY, address)


def test_an_address_at_which_nothing_listens_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_address(f"127.0.0.1:{port}")
    with pytest.raises(BadRequest) as caught:
        check_address(f"127.0.0.1:{port}")
    assert (caught.value.key, caught.value.value) == (ADDRESS_KEY, f"127.0.0.1:{port}")


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_missing_ray_is_refused_before_a_model_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    file = REPOSITORY / "examples" / "reverse-text" / "rl.toml"  # its model is trained by SFT
    words = ["rl", str(file), "--launch.on", "ray", "--output_dir", str(tmp_path / "run"), *options]
    assert main(words) == BAD_INPUT
    error = capsys.readouterr().err
    assert 'launch.on = "ray"' in error and "pip install 'headrace[ray]'" in error
    assert not (tmp_path / "cache").exists() and not (tmp_path / "run").exists()
