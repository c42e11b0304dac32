"""`/metrics` of a process of a run, in Prometheus' text format, and the parts of that format.

With `[prometheus]` each process serves its own metrics: a thread of the standard library's HTTP server, which computes
something only when it is scraped. The address is in `prometheus/targets/PROCESS.json` of the run directory, in the form
that `file_sd_configs` reads; there are as many files as processes, so none writes another one's.

Metrics of records get names after Prometheus' conventions by `RULES`; others, such as those of an environment or of a
user's own loss, are samples of `headrace_metric` with their name as a label. Counters begin at 0 with the process,
except totals of the run, which go back when a run goes on from a checkpoint.
"""

from __future__ import annotations

import errno
import logging
import math
import re
import socket
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from headrace.config.base import ConfigError
from headrace.config.monitors import PrometheusConfig
from headrace.observe.histograms import BOUNDS, PREFIX, decode
from headrace.observe.metrics import OBSERVERS
from headrace.observe.status import Status
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)

MAX_TRIED_PORTS = 100
REQUEST_TIMEOUT_S = 10.0
Lines = Iterable[str]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def family_head(name: str, kind: str, help_text: str) -> Iterator[str]:
    """Yield the two lines that come before the samples of a metric."""
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"


def sample_line(name: str, value: float, labels: Mapping[str, str] | None = None) -> str:
    """Return the line of one value."""
    shown = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in (labels or {}).items())
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


class Histogram:
    """Counts of observations up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> Iterator[str]:
        below = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            yield sample_line(f"{name}_bucket", below, {"le": bound})
        yield sample_line(f"{name}_sum", self.total)
        yield sample_line(f"{name}_count", below)


@dataclass(frozen=True)
class Rule:
    """How metrics whose name matches `pattern` are shown; its named groups are labels."""

    pattern: str
    family: str
    help: str
    kind: str = "gauge"
    summed: bool = False
    """Whether records have what happened since the last one, which is added up."""


_STAT = r"(?P<stat>mean|max|min)"
_ENV = r"(?:/(?P<env>.+))?"
RULES = (
    Rule(rf"reward/(?P<env>[^/]+)/{_STAT}", "headrace_reward", "Reward of the rollouts of a step."),
    Rule(r"eval/(?P<env>.+)/avg@(?P<k>\d+)", "headrace_eval_reward", "Mean reward of an evaluation."),
    Rule(r"eval/(?P<env>.+)/pass@(?P<k>\d+)", "headrace_eval_pass_ratio", "Tasks with a right answer among k."),
    Rule(r"eval/(?P<env>[^/]+)/errors", "headrace_eval_failed_ratio", "Failed episodes of an evaluation."),
    Rule(
        rf"(?P<part>decode|prefill|seq)_len/(?P<env>[^/]+)/{_STAT}",
        "headrace_rollout_tokens",
        "Tokens of a rollout that were sampled (decode), in prompts (prefill), and in all (seq).",
    ),
    Rule(rf"num_turns/(?P<env>[^/]+)/{_STAT}", "headrace_rollout_turns", "Replies of the model in a rollout."),
    Rule(rf"off_policy/staleness/{_STAT}", "headrace_staleness_steps", "Steps between sampling and training."),
    Rule(r"effective_batch_size", "headrace_batch_kept_ratio", "Rollouts of a batch that are trained on."),
    Rule(r"solve_(?P<which>all|none)", "headrace_groups_solved_ratio", "Groups that are all right, and all wrong."),
    Rule(r"stop_condition/(?P<reason>.+)", "headrace_stop_ratio", "Rollouts by how they ended."),
    Rule(r"errors/(?P<reason>.+)", "headrace_failed_rollouts_total", "Rollouts that failed.", "counter", True),
    Rule(r"dropped/(?P<reason>.+)", "headrace_dropped_rollouts_total", "Rollouts not trained on.", "counter", True),
    Rule(r"progress/rollouts", "headrace_run_rollouts_total", "Rollouts of the run.", "counter"),
    Rule(r"progress/tokens_sampled", "headrace_run_sampled_tokens_total", "Tokens sampled in the run.", "counter"),
    Rule(r"progress/tokens_trained", "headrace_run_trained_tokens_total", "Tokens trained in the run.", "counter"),
    Rule(r"progress/seconds", "headrace_run_seconds_total", "Seconds that the orchestrator has run.", "counter"),
    Rule(r"optim/skipped", "headrace_run_skipped_updates_total", "Updates skipped in the run.", "counter"),
    Rule(r"progress/incarnation", "headrace_weights_incarnation", "Grows when the trainer goes back."),
    Rule(r"time/(?P<part>\w+)", "headrace_step_seconds", "Seconds of the parts of the last step."),
    Rule(r"perf/trained_tokens_per_second", "headrace_trained_tokens_per_second", "Tokens trained, waiting included."),
    Rule(r"perf/sampled_tokens_per_second", "headrace_sampled_tokens_per_second", "Tokens sampled, waiting included."),
    Rule(r"perf/slots_used", "headrace_engine_slots_used_ratio", "Slots of the engines with an episode."),
    Rule(rf"loss{_ENV}", "headrace_loss", "Loss of the last step."),
    Rule(rf"entropy{_ENV}", "headrace_entropy_nats", "Mean entropy of the trained tokens."),
    Rule(rf"mismatch_kl{_ENV}", "headrace_mismatch_kl_nats", "Distance of trainer and sampling probabilities."),
    Rule(rf"is_masked{_ENV}", "headrace_masked_ratio", "Tokens that the loss masks."),
    Rule(rf"is_clipped{_ENV}", "headrace_clipped_ratio", "Tokens whose ratio is clipped."),
    Rule(r"optim/lr", "headrace_learning_rate", "Learning rate of the last step."),
    Rule(r"optim/grad_norm", "headrace_gradient_norm", "Norm of the gradient before it is scaled down."),
    Rule(r"drift/(?P<part>\w+)", "headrace_drift_nats", "Parts of the mismatch."),
    Rule(r"dispatcher/inflight_(?P<kind>\w+)", "headrace_episodes_in_flight", "Episodes that run."),
    Rule(r"dispatcher/max_inflight", "headrace_episodes_capacity", "Episodes that may run at once."),
    Rule(r"event_loop_lag/(?P<stat>\w+)", "headrace_event_loop_lag_seconds", "Delay of the event loop."),
)
OTHER = Rule(r"(?P<name>.+)", "headrace_metric", "Any other metric, by its name in metrics.jsonl.")
HISTOGRAMS = {
    "advantages": ("headrace_advantage", "Mean advantage of each rollout."),
    "decode_len": ("headrace_completion_tokens", "Tokens sampled in each rollout."),
    "ratio": ("headrace_importance_ratio", "Probability of each trained token over that at sampling."),
}


@lru_cache(maxsize=4096)
def _rule_of(name: str) -> tuple[Rule, tuple[tuple[str, str], ...]]:
    """Return the rule of a metric, and its labels."""
    for rule in (*RULES, OTHER):
        if match := re.fullmatch(rule.pattern, name, re.DOTALL):
            return rule, tuple((label, text) for label, text in match.groupdict().items() if text is not None)
    raise AssertionError(name)  # the last rule matches everything but the empty name


class RecordedMetrics:
    """What this process has recorded: the last value of every metric, and sums where a record is an increment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step: int | None = None
        self._values: dict[str, float] = {}
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._histograms: dict[str, Histogram] = {}

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        with self._lock:
            self._step = step
            for name, value in metrics.items():
                if isinstance(value, str) and name.startswith(PREFIX):
                    key = name.removeprefix(PREFIX)
                    histogram, added = self._histograms.setdefault(key, Histogram(BOUNDS[key])), decode(key, value)
                    histogram.counts = [a + b for a, b in zip(histogram.counts, added.counts.tolist(), strict=True)]
                    histogram.total += added.total
                elif name and isinstance(value, int | float) and math.isfinite(value):
                    self._values[name] = value
                    self._sums[name] += value if _rule_of(name)[0].summed else 0

    def lines(self) -> Iterator[str]:
        with self._lock:
            values, sums, histograms = dict(self._values), dict(self._sums), dict(self._histograms)
        if self._step is not None:
            yield from family_head("headrace_step", "gauge", "Step of the last record of this process.")
            yield sample_line("headrace_step", self._step)
        families: dict[str, list[str]] = {}
        for name, value in sorted(values.items()):
            rule, labels = _rule_of(name)
            lines = families.setdefault(rule.family, list(family_head(rule.family, rule.kind, rule.help)))
            lines.append(sample_line(rule.family, sums[name] if rule.summed else value, dict(labels)))
        for lines in families.values():
            yield from lines
        for name, histogram in sorted(histograms.items()):
            family, help_text = HISTOGRAMS[name]
            yield from family_head(family, "histogram", help_text)
            yield from histogram.lines(family)


def status_lines(status: Status) -> Iterator[str]:
    """Return how long this process has been waiting, and whether it has reported a problem."""
    current = status.current
    waiting_s = time.monotonic() - current.waiting_since if current.waiting_for else 0.0
    yield from family_head(
        "headrace_waiting_seconds", "gauge", "How long the process has been waiting for another one."
    )
    yield sample_line("headrace_waiting_seconds", waiting_s)
    yield from family_head("headrace_problem", "gauge", "1 while the process reports why the run does not advance.")
    yield sample_line("headrace_problem", int(bool(current.problem)))


@contextmanager
def exporting_records(config: PrometheusConfig | None, run: RunDir, status: Status) -> Iterator[None]:
    """Serve the records and the status of this process while inside."""
    if config is None or not config.enabled:
        yield
        return
    recorded = RecordedMetrics()
    OBSERVERS.append(recorded.record)
    try:
        with exporting(config, run, status.path.stem, lambda: (*status_lines(status), *recorded.lines())):
            yield
    finally:
        OBSERVERS.remove(recorded.record)


@contextmanager
def exporting(config: PrometheusConfig | None, run: RunDir, process: str, lines: Callable[[], Lines]) -> Iterator[None]:
    """Serve what `lines` returns as `/metrics` while inside, and announce the address in the run directory."""
    if config is None or not config.enabled:
        yield
        return
    server = _listen(config.host, config.port, lines)
    port, host = server.server_address[1], config.host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    target = run.prometheus_targets / f"{process}.json"
    labels = {"run": run.root.resolve().name, "process": process}
    write_atomically(target, msgspec.json.encode([{"targets": [address], "labels": labels}]))
    log.info("metrics for Prometheus: http://%s/metrics", address)
    thread = threading.Thread(target=server.serve_forever, name="prometheus", daemon=True)
    thread.start()
    try:
        yield
    finally:
        target.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()


def _listen(host: str, port: int, lines: Callable[[], Lines]) -> ThreadingHTTPServer:
    """Return a server on the first free port from `port` on; 0: on any."""

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = "\n".join([*lines(), ""]).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Scrapes are not logged."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    for candidate in range(port, min(port + MAX_TRIED_PORTS, 65536)):
        try:
            return Server((host, candidate), Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                fix = "Use an address of this machine, or 127.0.0.1."
                raise ConfigError(str(error), key="prometheus.host", value=host, fix=fix) from error
    fix = "Use another port, or 0 for any free one."
    raise ConfigError(f"{MAX_TRIED_PORTS} ports from it on are in use", key="prometheus.port", value=port, fix=fix)
