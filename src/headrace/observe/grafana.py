"""A Grafana dashboard of what a run serves to Prometheus: `prometheus/dashboard.json` of its directory."""

from __future__ import annotations

from typing import Any

PANEL_WIDTH, PANEL_HEIGHT, PANELS_PER_ROW = 8, 8, 3
SELECTED = '{run=~"$run"}'

PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Reward", "none", (('headrace_reward{run=~"$run",stat="mean"}', "{{run}} {{env}}"),)),
    ("Held-out reward", "none", ((f"headrace_eval_reward{SELECTED}", "{{run}} {{env}}"),)),
    ("Steps", "none", ((f"headrace_run_step{SELECTED}", "{{run}}"),)),
    ("Sampled tokens", "tokens/s", ((f"headrace_sampled_tokens_per_second{SELECTED}", "{{run}}"),
     (f"sum by (run) (rate(headrace_tokens_sampled_total{SELECTED}[1m]))", "{{run}} servers"))),
    ("Trained tokens", "tokens/s", ((f"headrace_trained_tokens_per_second{SELECTED}", "{{run}}"),)),
    ("Parts of a step", "s", ((f"headrace_step_seconds{SELECTED}", "{{process}} {{part}}"),)),
    ("Waiting", "s", ((f"headrace_process_waiting_seconds{SELECTED}", "{{process}}"),)),
    ("Restarts", "none", ((f"headrace_process_restarts_total{SELECTED}", "{{unit}}"),)),
    ("Running processes", "none", ((f"sum by (run) (headrace_process_running{SELECTED})", "{{run}}"),)),
    ("Loss", "none", ((f"headrace_loss{SELECTED}", "{{run}} {{env}}"),)),
    ("Entropy", "none", ((f"headrace_entropy_nats{SELECTED}", "{{run}} {{env}}"),)),
    ("Gradient norm", "none", ((f"headrace_gradient_norm{SELECTED}", "{{run}}"),)),
    ("Mismatch of trainer and engine", "none", ((f"headrace_mismatch_kl_nats{SELECTED}", "{{run}} {{env}}"),
                                                (f"headrace_drift_nats{SELECTED}", "{{run}} {{part}}"))),
    ("Staleness", "none", ((f"headrace_staleness_steps{SELECTED}", "{{run}} {{stat}}"),)),
    ("Rollouts not trained on", "none",
     ((f"sum by (run, reason) (rate(headrace_dropped_rollouts_total{SELECTED}[5m]))", "{{reason}}"),
      (f"sum by (run, reason) (rate(headrace_failed_rollouts_total{SELECTED}[5m]))", "failed: {{reason}}"))),
    ("Requests", "none", ((f"headrace_requests_running{SELECTED}", "{{process}} running"),
                          (f"headrace_requests_waiting{SELECTED}", "{{process}} waiting"))),
    ("KV cache", "percentunit", ((f"headrace_kv_cache_usage{SELECTED}", "{{process}}"),)),
    ("Episodes in flight", "none", ((f"headrace_episodes_in_flight{SELECTED}", "{{run}} {{kind}}"),
                                    (f"headrace_episodes_capacity{SELECTED}", "{{run}} capacity"))),
)  # fmt: skip
"""Title, unit, and queries with their legends."""
HEAT_MAPS = (
    ("Advantages", "headrace_advantage_bucket"),
    ("Tokens of a reply", "headrace_completion_tokens_bucket"),
    ("Ratio of probabilities", "headrace_importance_ratio_bucket"),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports it."""
    panels = [_panel(title, "timeseries", unit, queries) for title, unit, queries in PANELS]
    for title, bucket in HEAT_MAPS:
        panel = _panel(
            title, "heatmap", "none", ((f"sum by (le) (increase({bucket}{SELECTED}[$__interval]))", "{{le}}"),)
        )
        panel["targets"][0]["format"] = "heatmap"
        panels.append(panel)
    for index, panel in enumerate(panels):
        row, column = divmod(index, PANELS_PER_ROW)
        place = {"x": column * PANEL_WIDTH, "y": row * PANEL_HEIGHT, "w": PANEL_WIDTH, "h": PANEL_HEIGHT}
        panel |= {"id": index + 1, "gridPos": place}
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    run = {
        "name": "run", "type": "query", "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": "label_values(headrace_run_step, run)", "refId": "runs"},
        "refresh": 2, "multi": True, "includeAll": True,
    }  # fmt: skip
    return {
        "title": "Headrace",
        "uid": "headrace",
        "tags": ["headrace"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, run]},
        "panels": panels,
    }


def _panel(title: str, kind: str, unit: str, queries: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": source}
        for index, (query, legend) in enumerate(queries)
    ]
    return {
        "title": title,
        "type": kind,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }
