"use strict";
/* Two or more runs over each other: curves, settings that differ, and whether the difference is more than noise. */
(() => {
  const { html, text, number, useMemo, useState } = HR;

  const Curves = ({ curves }) => {
    const charts = useMemo(
      () =>
        Object.entries(curves).map(([metric, variants]) => ({
          metric,
          lines: Object.entries(variants).flatMap(([variant, seeds]) => seeds.map((seed, i) => ({ name: seeds.length > 1 ? `${variant} #${i + 1}` : variant, x: seed.step, y: seed.value }))),
        })),
      [curves],
    );
    const [smoothing, setSmoothing] = useState(0);
    const [zoom, setZoom] = useState(null);
    return html`<div class="bar"><label>smoothing <input type="range" min="0" max="0.98" step="0.02" value=${smoothing} onInput=${(e) => setSmoothing(Number(e.target.value))} /></label>
        <button disabled=${!zoom} onClick=${() => setZoom(null)}>all steps</button></div>
      <div class="charts wide">${charts.map((chart) => html`<${HR.Chart} key=${chart.metric} title=${chart.metric} lines=${chart.lines} sync="compare" height=${240} smoothing=${smoothing} zoom=${zoom} onZoom=${setZoom} />`)}</div>`;
  };

  const interval = (d) => (d.low === null || d.high === null ? "no test" : `${number(d.low)} to ${number(d.high)}`);

  HR.pages.compare = ({ ids }) => {
    const [metric, setMetric] = useState("");
    const query = new URLSearchParams(ids.map((id) => ["run", id]));
    if (metric) query.set("metric", metric);
    const state = HR.useData(`/api/compare?${query}`);
    const runs = HR.useData("/api/runs").data?.runs ?? [];
    const nameOf = (id) => runs.find((run) => run.id === id)?.name ?? id;
    return html`<${HR.Title}>Compare ${ids.length} runs<//><${HR.Loaded} state=${state}>${({ comparison, curves, settings, names }) => html`
      <div class="bar"><${HR.Select} label="metric" value=${metric || comparison.metric} onChange=${setMetric} options=${[...new Set([comparison.metric, ...names])].map((name) => [name, name])} /></div>
      <${Curves} curves=${curves} />
      <h2>Differences</h2>
      <${HR.Table} label="differences" rows=${comparison.differences} columns=${[
        { key: "metric", title: "metric", down: false }, { key: "variant", title: "run", down: false }, { key: "baseline", title: "minus", down: false }, { key: "difference", title: "difference" },
        { key: "interval", title: "95% interval", sorts: false, right: true, show: interval }, { key: "p", title: "p" },
        { key: "verdict", title: "significant", sorts: false, show: (d) => (d.low === null || d.high === null ? "" : d.low > 0 || d.high < 0 ? "yes" : "no") },
        { key: "method", title: "test", down: false }, { key: "note", title: "note", sorts: false },
      ]} />
      <h2>Runs</h2>
      <${HR.Table} label="runs" rows=${comparison.runs} columns=${[
        { key: "name", title: "run", down: false }, { key: "variant", title: "variant", down: false }, { key: "seed", title: "seed" }, { key: "steps", title: "steps" },
        { key: "first", title: "first", value: (r) => r.metric.first, show: (r) => r.metric.first }, { key: "best", title: "best", value: (r) => r.metric.best, show: (r) => r.metric.best },
        { key: "last", title: "last", value: (r) => r.metric.last, show: (r) => r.metric.last }, { key: "seconds", title: "time", right: true, show: (r) => HR.seconds(r.seconds) },
        { key: "tokens_trained", title: "tokens trained" },
      ]} />
      ${comparison.notes.map((note, i) => html`<p key=${i} class="muted">${text(note)}</p>`)}
      <h2>Settings that differ</h2>
      <${HR.Table} label="settings that differ" id=${(row) => row.key} rows=${settings.keys.map((key, i) => ({ key, ...Object.fromEntries(ids.map((id) => [id, settings.values[id]?.[i]])) }))} columns=${[
        { key: "key", title: "key", down: false },
        ...ids.map((id) => ({ key: id, title: nameOf(id), value: (row) => JSON.stringify(row[id]), show: (row) => text(row[id] === null || row[id] === undefined ? "unset" : row[id]) || html`<i>empty</i>` })),
      ]} />`}<//>`;
  };
})();
