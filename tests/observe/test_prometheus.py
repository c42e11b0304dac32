"""`/metrics` of the processes of a run, found by the files of its directory and read with Prometheus' own parser."""

import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.config.base import ConfigError
from headrace.config.monitors import PrometheusConfig
from headrace.inference.backend import EngineState
from headrace.inference.server.metrics import Metrics
from headrace.launch.heartbeat import launcher_lines
from headrace.observe.grafana import dashboard
from headrace.observe.histograms import count
from headrace.observe.metrics import OBSERVERS, History, MetricsLog, read_metrics
from headrace.observe.prometheus import (
    HISTOGRAMS,
    OTHER,
    RULES,
    RecordedMetrics,
    exporting,
    exporting_records,
    status_lines,
)
from headrace.observe.status import ObservedStatus, Status
from headrace.rollout.version import Version
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import wait_until
from tests.observe.metrics_page import documented

RECORDED = Path(__file__).parents[1] / "data" / "recorded-runs"
STATE = EngineState(Version(0, 0), running=0, waiting=0, paused=False, capacity=1, kv_usage=0.0)


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and values of the labels."""
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))  # each family in one piece
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def scrape(run: RunDir, process: str) -> dict[tuple[str, ...], float]:
    (group,) = json.loads((run.prometheus_targets / f"{process}.json").read_text())
    assert group["labels"] == {"run": run.root.name, "process": process}
    with urllib.request.urlopen(f"http://{group['targets'][0]}/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return samples_of(answer.read().decode())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "my-run")


@pytest.fixture
def status(run: RunDir) -> Iterator[Status]:
    status = Status(run.status, "trainer")
    yield status
    status.close("finished")


def test_records_of_the_process_are_scraped_with_units_and_labels(run: RunDir, status: Status) -> None:
    log = MetricsLog(run.metrics, "trainer")
    hostile = 'a"b\\c\nd'
    with exporting_records(PrometheusConfig(), run, status):
        log.log(1, {"loss": 0.5, "time/step": 2.0, "errors/timeout": 3, f"metrics/{hostile}/x": 1.0})
        log.log(2, {"loss": float("nan"), "errors/timeout": 4, "progress/tokens_trained": 100})
        status.begin_wait("batch 3 from the orchestrator")
        samples = scrape(run, "trainer")
    assert samples["headrace_step",] == 2
    assert samples["headrace_loss",] == 0.5
    assert samples["headrace_step_seconds", "step"] == 2.0
    assert samples["headrace_failed_rollouts_total", "timeout"] == 7
    assert samples["headrace_run_trained_tokens_total",] == 100
    assert samples["headrace_metric", f"metrics/{hostile}/x"] == 1.0
    assert samples["headrace_waiting_seconds",] > 0
    assert not list(run.prometheus_targets.iterdir()) and not OBSERVERS


def test_histograms_add_up_over_steps(run: RunDir) -> None:
    recorded = RecordedMetrics()
    for values in ([0.5, 2.0], [-1000.0]):
        recorded.record(1, {"histogram/advantages": count("advantages", values).encode()})
    samples = samples_of("\n".join([*recorded.lines(), ""]))
    buckets = [value for (name, *_), value in samples.items() if name == "headrace_advantage_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == samples["headrace_advantage_count",] == 3
    assert samples["headrace_advantage_bucket", "1.0"] == 2
    assert samples["headrace_advantage_sum",] == -997.5


def test_every_metric_of_a_recorded_run_is_valid_and_follows_the_conventions() -> None:
    recorded = RecordedMetrics()
    for name in ("rl", "sft", "hackable"):
        for record in read_metrics(RunDir(RECORDED / name).metrics):
            recorded.record(record["step"], record)
    text = "\n".join([*recorded.lines(), ""])
    for family in text_string_to_metric_families(text):
        assert family.documentation and re.fullmatch(r"headrace_[a-z_]+", family.name)
        assert not family.name.endswith("_total") or family.type == "counter"
    assert ("headrace_reward", "all", "mean") in samples_of(text)


def test_nothing_listens_unless_it_is_configured(run: RunDir, status: Status) -> None:
    for config in (None, PrometheusConfig(enabled=False)):
        with exporting_records(config, run, status):
            assert not run.prometheus_targets.exists() and not OBSERVERS


def test_processes_of_one_host_take_the_next_free_port(run: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as stack:
        config = PrometheusConfig(port=taken.getsockname()[1])
        for rank in range(3):
            stack.enter_context(exporting(config, run, f"trainer-{rank}", lambda: []))
        targets = [json.loads(path.read_text())[0]["targets"][0] for path in run.prometheus_targets.iterdir()]
        ports = {int(target.rpartition(":")[2]) for target in targets}
    assert len(ports) == 3 and min(ports) > config.port


RANK = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from headrace.cli.processes import process
from headrace.config.monitors import PrometheusConfig
from headrace.observe.metrics import MetricsLog
from headrace.observe.prometheus import exporting_records
from headrace.transport.run_dir import RunDir

run, scraped = RunDir(Path(sys.argv[1])), Path(sys.argv[2])
dist.init_process_group("gloo")
with process("trainer", run) as status, exporting_records(PrometheusConfig(port=int(sys.argv[3])), run, status):
    status.set("training step 1")
    if dist.get_rank() == 0:
        MetricsLog(run.metrics, "trainer").log(1, {"loss": 0.5})
    while not scraped.exists():
        time.sleep(0.1)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_every_rank_serves_its_status_on_a_port_of_its_own_and_the_first_one_the_records(
    run: RunDir, tmp_path: Path
) -> None:
    script, scraped = tmp_path / "rank.py", tmp_path / "scraped"
    script.write_text(RANK)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        arguments = [str(script), str(run.root), str(scraped), str(taken.getsockname()[1])]
        with subprocess.Popen([sys.executable, *torchrun, *arguments]) as ranks:
            try:
                names = ("trainer", "trainer-1")
                targets = [run.prometheus_targets / f"{name}.json" for name in names]
                files = [*targets, run.metrics]
                wait_until(lambda: ranks.poll() is not None or all(file.exists() for file in files), "ranks", 200)
                first, second = (scrape(run, name) for name in names)
                addresses = {json.loads(target.read_text())[0]["targets"][0] for target in targets}
            finally:
                scraped.touch()
        assert ranks.returncode == 0
    assert len(addresses) == 2
    assert first["headrace_loss",] == 0.5
    assert "headrace_loss" not in {name for name, *_ in second}
    assert {name for name, *_ in second} <= {name for name, *_ in first}
    assert not list(run.prometheus_targets.iterdir())


def test_an_address_of_another_machine_is_refused_by_its_key(run: RunDir) -> None:
    with pytest.raises(ConfigError) as refused, exporting(PrometheusConfig(host="192.0.2.1"), run, "x", lambda: []):
        pass
    assert refused.value.key == "prometheus.host"


def test_other_paths_are_not_found(run: RunDir) -> None:
    with exporting(PrometheusConfig(), run, "launcher", lambda: []):
        (group,) = json.loads((run.prometheus_targets / "launcher.json").read_text())
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{group['targets'][0]}/../etc/passwd")
    assert refused.value.code == 404


def launcher_text() -> str:
    status = ObservedStatus("trainer", 1, 100.0, "waiting", "batch 3", 40.0, silent_s=2.0)
    history = History([{"step": 3, "time": 5.0, "process": "trainer", "loss": 1.0}])
    lines = launcher_lines(history, {"trainer": status}, {"trainer": True, "inference": False}, {"trainer": 1})
    return "\n".join([*lines, ""])


def test_the_launcher_shows_progress_waits_and_restarts() -> None:
    samples = samples_of(launcher_text())
    assert samples["headrace_run_step",] == 3
    assert samples["headrace_process_waiting_seconds", "trainer"] == 62.0
    assert samples["headrace_process_restarts_total", "trainer"] == 1
    assert [samples["headrace_process_running", name] for name in ("inference", "trainer")] == [0, 1]


def served_names(status: Status) -> set[str]:
    """Every family that a process of a run can serve."""
    texts = [*status_lines(status), *Metrics().lines(STATE, "model"), *launcher_text().splitlines()]
    recorded = {"headrace_step", *(rule.family for rule in (*RULES, OTHER)), *(name for name, _ in HISTOGRAMS.values())}
    return recorded | {line.split(" ")[2] for line in texts if line.startswith("# TYPE ")}


def test_every_name_is_documented(status: Status) -> None:
    assert {name for name in documented() if name.startswith("headrace_")} == served_names(status)


def test_the_dashboard_asks_for_metrics_that_exist(status: Status) -> None:
    content = dashboard()
    queries = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in content["templating"]["list"] if variable["name"] == "run"]
    names = [
        re.sub(r"_(bucket|sum|count)$", "", name) for query in queries for name in re.findall(r"headrace_\w+", query)
    ]
    assert len(names) >= len(content["panels"]) > 15
    assert set(names) <= served_names(status)
    assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])
