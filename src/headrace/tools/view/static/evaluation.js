"use strict";
/* Evaluations: curves with intervals, pass@k, and tasks before and after. */
(() => {
  const { html, text, number, useMemo, useState } = HR;

  const Environment = ({ env }) => {
    const lines = useMemo(() => [{ name: env.name, x: env.version, y: env.value, low: env.low, high: env.high }], [env]);
    const pass = useMemo(() => (env.pass?.version ?? []).map((version, i) => ({ name: `version ${version}`, x: env.pass.k, y: env.pass.value[i] })), [env]);
    return html`<${HR.Chart} title=${`${env.name}: held-out reward, 95% interval`} lines=${lines} xLabel="version" />
      ${pass.length > 0 && env.pass.k.length > 1 && html`<${HR.Chart} title=${`${env.name}: pass@k`} lines=${pass} xLabel="k" />`}`;
  };

  const links = (id, version, rows) => rows.map((row, i) => html`${i > 0 && " "}<a key=${row} href=${HR.runLink(id, "evaluation", version, "rollout", row)}>${row}</a>`);

  const Flips = ({ id, before, after }) => {
    const [flip, setFlip] = useState("");
    const state = HR.useData(`/api/runs/${id}/evaluation/${before}/${after}`);
    return html`<${HR.Loaded} state=${state}>${(data) => {
      const rows = HR.rows(data.tasks);
      const count = (kind) => rows.filter((row) => row.flip === kind).length;
      return html`<div class="bar"><${HR.Select} label="show" value=${flip} onChange=${setFlip} options=${[["", `all tasks (${rows.length})`], ["gained", `gained (${count("gained")})`], ["lost", `lost (${count("lost")})`]]} /></div>
        <${HR.Table} label="tasks" rows=${flip ? rows.filter((row) => row.flip === flip) : rows} columns=${[
          { key: "env", title: "environment", down: false }, { key: "task_key", title: "task", down: false },
          { key: "before", title: `version ${before}` }, { key: "after", title: `version ${after}` },
          { key: "change", title: "change", value: (row) => (row.before === null || row.after === null ? null : row.after - row.before), show: (row) => (row.before === null || row.after === null ? null : row.after - row.before) },
          { key: "flip", title: "flip", show: (row) => html`<span class=${row.flip === "gained" ? "gained" : row.flip === "lost" ? "lost" : ""}>${text(row.flip)}</span>` },
          { key: "rows_before", title: "samples before", sorts: false, show: (row) => links(id, before, row.rows_before) },
          { key: "rows_after", title: "samples after", sorts: false, show: (row) => links(id, after, row.rows_after) },
          { key: "preview", title: "task", sorts: false, show: (row) => html`<span class="preview">${text(row.preview)}</span>` },
        ]} />`;
    }}<//>`;
  };

  const Tasks = ({ id, saved }) => {
    const [pair, setPair] = useState([saved[0], saved.at(-1)]);
    const options = saved.map((version) => [version, `version ${version}`]);
    return html`<h2>Tasks before and after</h2>
      <div class="bar"><${HR.Select} label="before" value=${pair[0]} options=${options} onChange=${(v) => setPair([Number(v), pair[1]])} />
        <${HR.Select} label="after" value=${pair[1]} options=${options} onChange=${(v) => setPair([pair[0], Number(v)])} /></div>
      <${Flips} id=${id} before=${pair[0]} after=${pair[1]} />`;
  };

  HR.pages.evaluation = ({ run, id }) => {
    const state = HR.useData(`/api/runs/${id}/evaluation`, run.eval_steps.length);
    return html`<h2>Evaluation</h2><${HR.Loaded} state=${state}>${(data) => html`
      <div class="charts">${data.environments.map((env) => html`<${Environment} key=${env.name} env=${env} />`)}</div>
      ${data.environments.length === 0 && html`<p class="muted">This run has no evaluations.</p>`}
      ${data.saved.length > 1 && html`<${Tasks} id=${id} saved=${data.saved} />`}
      ${data.environments.map((env) => html`<h3 key=${env.name}>${text(env.name)}</h3><${HR.Table} label=${`evaluations of ${text(env.name)}`} rows=${HR.rows({ version: env.version, value: env.value, low: env.low, high: env.high, failed: env.failed })}
        columns=${["version", "value", "low", "high", "failed"].map((key) => ({ key, title: key }))} />`)}`}<//>`;
  };
})();
