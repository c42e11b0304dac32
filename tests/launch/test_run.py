"""What the launcher makes of a configuration: ports that must be free, and how long processes may take to come up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError
from headrace.config.sft import SftConfig
from headrace.launch.errors import LaunchError
from headrace.launch.hosts.base import Host, ProcessSpec
from headrace.launch.processes import on_this_machine, place_here, processes_of, thread_env
from headrace.launch.replacement import RunPlan
from headrace.launch.run import check_ports, exported
from headrace.machine import VISIBLE_GPUS_VAR
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir
from tests.refusals import refused


def run_of(launch: Any = None, inference: Any = None, **orchestrator: Any) -> RunConfig:
    tree = {
        "output_dir": "outputs/unused",
        "max_steps": 1,
        "seq_len": 64,
        "model": {"name": "tiny"},
        "launch": launch or {},
        "inference": inference or {},
        "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}, **orchestrator},
    }
    return RunConfig.model_validate(tree)


def specs_of(config: RunConfig | SftConfig, run: Path, **options: Any) -> list[ProcessSpec]:
    return processes_of(config, RunDir(run), place_here(config), **{"resume": False, **options})


@pytest.fixture
def pair() -> Iterator[tuple[int, socket.socket]]:
    """Two ports in a row: the first is free, the second is taken."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            first.close()
            second.listen()
            yield port, second
            return


def test_the_port_of_every_server_is_looked_at(pair: tuple[int, socket.socket], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VISIBLE_GPUS_VAR, "")
    port, _ = pair
    check_ports(run_of(inference={"port": port}))
    with pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1:{port + 1}"):
        check_ports(run_of({"inference_servers": 2}, {"port": port}))
    check_ports(run_of({"inference_servers": 2}, {"port": 0}))


def test_ports_beyond_the_last_one_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VISIBLE_GPUS_VAR, "")
    with refused(ConfigError, key="inference.port", value=65535):
        check_ports(run_of({"inference_servers": 2}, {"port": 65535}))


def test_where_the_engines_are_elsewhere_no_server_is_started_and_all_of_them_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VISIBLE_GPUS_VAR, "0,1")
    config = run_of(client={"base_url": ["http://one:8000", "http://two:8000"]})
    trainer, orchestrator = specs_of(config, tmp_path)
    assert (trainer.name, orchestrator.name) == ("trainer", "orchestrator")
    assert trainer.env[VISIBLE_GPUS_VAR] == "0,1"
    assert orchestrator.argv[-2:] == ["--servers", "2"]
    assert on_this_machine(config) == ["no inference server is started; using http://one:8000, http://two:8000"]


@pytest.mark.parametrize(
    ("tree", "trainer_threads"),
    [
        ({}, "8"),
        ({"launch": {"trainer_processes": 2}}, "4"),
        ({"launch": {"threads": 3}}, "3"),
        ({"eval": {"env": [{"id": "reverse-text"}]}}, "4"),
    ],
)
def test_an_sft_trainer_uses_every_core_unless_an_engine_computes_beside_it(
    tree: dict[str, Any], trainer_threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VISIBLE_GPUS_VAR, "")
    monkeypatch.setattr("headrace.launch.hosts.local.usable_cores", lambda: 8)
    given = {"output_dir": str(tmp_path), "max_steps": 1, "seq_len": 64, "data": {"env": "reverse-text"}}
    config = SftConfig.model_validate({**given, "model": {"name": "tiny"}, **tree})
    specs = {spec.name: spec for spec in specs_of(config, tmp_path)}
    assert specs["trainer"].env["OMP_NUM_THREADS"] == trainer_threads
    assert [spec.env["OMP_NUM_THREADS"] for name, spec in specs.items() if name == "inference"] == ["4"] * (
        "eval" in tree
    )


def test_threads_wait_without_spinning_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert thread_env(2)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert thread_env(2)["OMP_WAIT_POLICY"] == "ACTIVE"


def test_only_vllm_spreads_a_server_over_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VISIBLE_GPUS_VAR, "0,1,2,3,4,5,6,7")
    parallel = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    embedded = place_here(run_of(inference={"vllm": parallel}))
    assert [len(server.gpus) for server in embedded.servers] == [1, 1, 1, 1]
    vllm = place_here(run_of(inference={"engine": "vllm", "vllm": parallel}))
    assert [server.gpus for server in vllm.servers] == [("0", "1", "2", "3")]


@pytest.mark.parametrize(
    ("gpus", "inference", "expected"),
    [
        ("0", {"engine": "vllm"}, ["--vllm.gpu_memory_utilization", "0.4", "--sharing", "alternate"]),
        (
            "0",
            {"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.7}},
            ["--vllm.gpu_memory_utilization", "0.7", "--sharing", "alternate"],
        ),
        ("0", {}, ["--sharing", "alternate"]),
        ("0,1", {"engine": "vllm"}, []),
    ],
)
def test_vllm_leaves_the_trainer_memory_where_they_share_a_gpu(
    gpus: str, inference: dict[str, Any], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VISIBLE_GPUS_VAR, gpus)
    server, *_ = specs_of(run_of(inference=inference), tmp_path)
    assert list(server.argv[server.argv.index("serve") + 2 :]) == expected


@pytest.mark.parametrize(
    ("gpus", "launch", "trainer_waits", "sharing"),
    [
        ("0", {}, True, "alternate"),
        ("0", {"sharing": "overlap"}, True, "overlap"),
        ("0", {}, False, "overlap"),
        ("0,1", {"sharing": "alternate"}, True, None),
        ("", {}, True, None),
        ("", {"sharing": "alternate"}, True, "alternate"),
        ("", {"sharing": "overlap"}, True, None),
        ("", {"sharing": "alternate", "trainer_processes": 2}, True, None),
    ],
)
def test_every_process_gets_the_sharing_of_its_device(
    gpus: str,
    launch: dict[str, Any],
    trainer_waits: bool,
    sharing: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(VISIBLE_GPUS_VAR, gpus)
    sft = {"output_dir": "outputs/unused", "max_steps": 1, "seq_len": 64, "model": {"name": "tiny"}, "launch": launch}
    evaluated = {**sft, "data": {"env": "reverse-text"}, "eval": {"env": [{"id": "reverse-text"}]}}
    config = run_of(launch) if trainer_waits else SftConfig.model_validate(evaluated)
    server, trainer, orchestrator = specs_of(config, tmp_path, resume=True)
    for argv in (server.argv, trainer.argv, trainer.again().argv, orchestrator.argv):
        assert (argv[argv.index("--sharing") + 1] if "--sharing" in argv else None) == sharing


@pytest.mark.parametrize(("inference", "passed"), [({}, True), ({"max_running": 9}, False)])
def test_planned_slots_are_passed_to_the_servers_unless_configured(
    inference: dict[str, Any], passed: bool, tmp_path: Path
) -> None:
    server, *others = specs_of(run_of(inference=inference), tmp_path, max_running=512)
    assert (" --max_running 512" in " ".join(server.argv)) == passed
    assert not any("--max_running" in process.argv for process in others)


def test_processes_on_other_hosts_get_the_variables_and_keys_of_the_run_but_not_on_their_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("HEADRACE_API_KEY", "HEADRACE_ADMIN_KEY"):
        monkeypatch.setenv(name, "")  # so that what is made here is removed afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN", "secret")
    launch = {"on": "nodes", "env": {"NAME": "value"}, "env_from": {"HF_TOKEN": "MY_TOKEN"}}
    config = run_of(launch)
    env = exported(config)
    assert env["NAME"] == "value" and env["HF_TOKEN"] == "secret"
    assert exported(config) == env  # a second start uses the same keys
    keys = [env["HEADRACE_API_KEY"], env["HEADRACE_ADMIN_KEY"]]
    assert len({*keys}) == 2 and min(map(len, keys)) >= 32
    hosts = [Host("a", "10.0.0.1", cores=2), Host("b", "10.0.0.2", cores=2)]
    specs = RunPlan(config, RunDir(tmp_path), hosts, resume=False, env=env).specs()
    assert all(spec.env.items() >= env.items() for spec in specs)
    assert not any(secret in word for spec in specs for word in spec.argv for secret in (*keys, "secret"))
