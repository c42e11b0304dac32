"use strict";
/* One run: its charts, where the time went, its processes and notices; and the search over its texts. */
(() => {
  const { html, text, number, seconds, useMemo, useState, useRef } = HR;

  const lineOf = (name, series) => ({ name, x: series.step, y: series.mean, low: series.min, high: series.max });

  /* What `headrace doctor` finds; the numbers are those of when it was found. */
  HR.Banner = ({ run }) =>
    run.doctor?.length > 0 &&
    html`<ul class="banner" role="alert">${run.doctor.map(
      (finding) => html`<li key=${finding.kind + finding.process} class=${finding.severity}>
        <strong>${text(finding.process)}</strong>: ${text(finding.fact)} <em>${text(finding.fix)}</em></li>`,
    )}</ul>`;

  const Processes = ({ processes }) =>
    processes.length > 0 &&
    html`<h2>Processes</h2><${HR.Table} label="processes" rows=${processes} columns=${[
      { key: "process", title: "process", down: false },
      { key: "pid", title: "pid", show: (p) => text(String(p.pid ?? "")) },
      { key: "state", title: "state", down: false },
      { key: "waiting_for", title: "waiting for", show: (p) => (p.waiting_for ? `${text(p.waiting_for)} (${seconds(p.waiting_s)})` : "") },
      { key: "progress", title: "progress", show: (p) => text(p.progress) },
      { key: "silent_s", title: "last sign of life", show: (p) => (p.silent_s === null || p.silent_s === undefined ? "" : `${seconds(p.silent_s)} ago`) },
      { key: "problem", title: "problem", show: (p) => text(p.problem) },
    ]} />`;

  const Toolbar = ({ smoothing, setSmoothing, log, setLog, zoom, setZoom, last }) => {
    const edge = (i) => (event) => {
      const value = Number(event.target.value);
      const next = [...(zoom ?? [0, last])];
      next[i] = value;
      if (next[0] < next[1]) setZoom(next);
    };
    return html`<div class="bar sticky">
      <label>smoothing <input type="range" min="0" max="0.98" step="0.02" value=${smoothing} onInput=${(e) => setSmoothing(Number(e.target.value))} /></label>
      <label><input type="checkbox" checked=${log} onChange=${(e) => setLog(e.target.checked)} /> log scale</label>
      <label>steps <input type="number" min="0" value=${zoom ? Math.round(zoom[0]) : 0} onChange=${edge(0)} /></label>
      <label>to <input type="number" min="0" value=${zoom ? Math.round(zoom[1]) : last} onChange=${edge(1)} /></label>
      <button disabled=${!zoom} onClick=${() => setZoom(null)}>all steps</button>
      <span class="muted">drag in a chart to zoom, double click for all</span></div>`;
  };

  const Lanes = ({ id, version, zoom, ...shared }) => {
    const query = zoom ? `?first=${Math.round(zoom[0])}&last=${Math.round(zoom[1])}` : "";
    const { data } = HR.useData(HR.has(`/api/runs/${id}/lanes`) ? `/api/runs/${id}/lanes${query}` : null, version);
    const lanes = useMemo(() => (data ? HR.laneLines(data) : []), [data]);
    return lanes.length > 0 && html`<h2>Where the time went</h2>
      <p class="muted">Seconds per step and process${data.steps_per_bucket > 1 ? `, mean of ${number(data.steps_per_bucket)} steps` : ""}. Orange is waiting.</p>
      <div class="charts wide">${lanes.map((lane) => html`<${HR.Chart} key=${lane.process} title=${lane.process} lines=${lane.lines} stack=${true} unit="s" height=${110} ...${shared} zoom=${zoom} />`)}</div>`;
  };

  const Histograms = ({ id, version, zoom, marks }) => {
    const query = zoom ? `?first=${Math.floor(zoom[0])}&last=${Math.ceil(zoom[1])}` : "";
    const { data } = HR.useData(HR.has(`/api/runs/${id}/histograms`) ? `/api/runs/${id}/histograms${query}` : null, version);
    return data?.histograms.length > 0 && html`<h2>Histograms</h2>
      <p class="muted">Steps from left to right; the darker, the larger the share of a step's values.</p>
      <div class="charts">${data.histograms.map((histogram) => html`<${HR.HeatMap} key=${histogram.name} marks=${marks} ...${histogram} />`)}</div>`;
  };

  HR.pages.run = ({ run, id }) => {
    const [smoothing, setSmoothing] = useState(0);
    const [log, setLog] = useState(false);
    const [zoom, setZoom] = useState(null);
    const { version } = run; // how often new metrics have arrived
    const query = zoom ? `?first=${Math.floor(zoom[0])}&last=${Math.ceil(zoom[1])}` : "";
    const state = HR.useData(`/api/runs/${id}/series${query}`, version);
    const series = state.data?.series;
    const path = HR.has(`/api/runs/${id}/evaluation`) ? `/api/runs/${id}/evaluation` : null;
    const { data: evaluation, error } = HR.useData(path, version);
    const isWhole = !path || evaluation || error; // else the chart of the evaluation would move the others when it comes
    const heldOut = useMemo(() => (evaluation?.environments ?? []).map((env) => ({ name: env.name, x: env.version, y: env.value, low: env.low, high: env.high })), [evaluation]);
    const charts = useMemo(
      () => run.charts.filter((chart) => chart.title !== "Evaluation" || !heldOut.length).map((chart) => ({ ...chart, lines: chart.names.filter((name) => series?.[name]).map((name) => lineOf(name, series[name])) })).filter((chart) => chart.lines.length),
      [series, run.charts, heldOut],
    );
    const marks = useMemo(() => run.notices.map((notice) => notice.step).filter((step) => Number.isInteger(step)), [run.notices]);
    const shared = { smoothing, log, zoom, onZoom: setZoom, sync: `run ${id}`, marks };
    return html`
      <${HR.Facts} facts=${run.summary.map(([label, value]) => [label, text(value)])} />
      ${Object.keys(run.dropped).length > 0 && html`<p>Dropped rollouts: ${Object.entries(run.dropped).map(([reason, count]) => `${text(reason)} ${number(count)}`).join(", ")}</p>`}
      ${run.notices.length > 0 && html`<h2>Notices</h2><ul class="notices">${run.notices.map((notice, i) => html`<li key=${i}><b>${text(notice.process)}</b> ${notice.step !== undefined && notice.step !== null ? `step ${notice.step}: ` : ""}${text(notice.text)}</li>`)}</ul>`}
      <h2>Charts</h2>
      <${Toolbar} ...${{ smoothing, setSmoothing, log, setLog, zoom, setZoom, last: state.data?.last ?? run.step ?? 0 }} />
      <${HR.Loaded} state=${isWhole ? state : {}}>${() => html`<div class="charts">
        ${heldOut.length > 0 && html`<${HR.Chart} key="held-out" title="Held-out reward, 95% interval" lines=${heldOut} ...${shared} smoothing=${0} />`}
        ${charts.map((chart) => html`<${HR.Chart} key=${chart.title} title=${chart.title} unit=${chart.unit} lines=${chart.lines} ...${shared} log=${log !== Boolean(chart.log)} />`)}</div>
        <${Histograms} id=${id} version=${version} zoom=${zoom} marks=${marks} />
        <${Lanes} id=${id} version=${version} zoom=${zoom} onZoom=${setZoom} sync=${`run ${id}`} />`}<//>
      <${Processes} processes=${run.processes} />`;
  };

  HR.pages.settings = ({ run }) => {
    const [filter, setFilter] = useState("");
    const rows = Object.entries(run.settings).filter(([key]) => key.includes(filter)).map(([key, value]) => ({ key, value: typeof value === "string" ? value : JSON.stringify(value) }));
    return html`<h2>Settings</h2><div class="bar"><label>filter <input type="search" value=${filter} onInput=${(e) => setFilter(e.target.value)} /></label></div>
      <${HR.Table} label="settings" rows=${rows} id=${(row) => row.key} columns=${[{ key: "key", title: "key", down: false }, { key: "value", title: "value", down: false }]} />`;
  };

  HR.pages.steps = ({ run, id }) => html`<h2>Steps with rollouts on disk</h2>
    <ul class="steps">${run.steps.map((step) => html`<li key=${step}><a href=${HR.runLink(id, "step", step)}>${step}</a>${run.token_steps.includes(step) && html`<sup title="tokens with gradients were exported">t</sup>`}</li>`)}</ul>
    ${run.steps.length === 0 && html`<p class="muted">None.</p>`}`;

  HR.pages.search = ({ id, query }) => {
    const wanted = query.get("text") ?? "";
    const input = useRef();
    const state = HR.useData(wanted ? `/api/runs/${id}/search?text=${encodeURIComponent(wanted)}` : null);
    const submit = (event) => {
      event.preventDefault();
      HR.go(`${HR.runLink(id, "search")}?text=${encodeURIComponent(input.current.value)}`);
    };
    const link = (hit) => (hit.kind === "eval" ? HR.runLink(id, "evaluation", hit.step, "rollout", hit.row) : HR.runLink(id, "step", hit.step, "rollout", hit.row));
    return html`<h2>Search</h2>
      <form class="bar" onSubmit=${submit}><label>text <input type="search" ref=${input} value=${wanted} /></label><button>Search</button></form>
      ${wanted && html`<${HR.Loaded} state=${state}>${(data) => html`<p role="status">${number(data.hits.length)}${data.more ? " or more" : ""} rollouts</p>
        <ul class="hits">${data.hits.map((hit, i) => html`<li key=${i}><a href=${link(hit)}>${hit.kind === "eval" ? "evaluation of version" : "step"} ${hit.step}, ${text(hit.env)}</a>
          <span class="muted">${text(hit.role)}, reward ${number(hit.reward)}</span><br /><span class="text">${text(hit.before)}<mark>${text(hit.match)}</mark>${text(hit.after)}</span></li>`)}</ul>`}<//>`}`;
  };
})();
