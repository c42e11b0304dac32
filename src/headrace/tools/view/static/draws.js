"use strict";
/* The draws of the journal, and the life of one of them. */
(() => {
  const { html, text, number, useState } = HR;
  const PAGE = 200;

  HR.pages.draws = ({ id, query }) => {
    const [filters, setFilters] = useState({ state: "", env: "", task: query.get("task") ?? "", offset: 0 });
    const asked = new URLSearchParams({ offset: filters.offset, limit: PAGE });
    for (const name of ["state", "env", "task"]) if (filters[name]) asked.set(name, filters[name]);
    const state = HR.useData(`/api/runs/${id}/draws?${asked}`);
    const set = (name) => (value) => setFilters({ ...filters, offset: 0, [name]: value });
    return html`<h2>Draws</h2><${HR.Loaded} state=${state}>${(data) => html`
      <div class="bar">
        <${HR.Select} label="state" value=${filters.state} onChange=${set("state")} options=${[["", "all"], ...Object.entries(data.states).map(([name, count]) => [name, `${name} (${count})`])]} />
        <${HR.Select} label="environment" value=${filters.env} onChange=${set("env")} options=${[["", "all"], ...data.environments.map((name) => [name, name])]} />
        <label>task <input type="search" value=${filters.task} onChange=${(e) => set("task")(e.target.value)} /></label>
        <button disabled=${filters.offset === 0} onClick=${() => setFilters({ ...filters, offset: Math.max(0, filters.offset - PAGE) })}>previous</button>
        <span role="status">${number(data.total ? filters.offset + 1 : 0)}–${number(Math.min(filters.offset + PAGE, data.total))} of ${number(data.total)}</span>
        <button disabled=${filters.offset + PAGE >= data.total} onClick=${() => setFilters({ ...filters, offset: filters.offset + PAGE })}>next</button></div>
      <${HR.Table} label="draws" rows=${HR.rows(data.draws)} id=${(draw) => draw.id} columns=${[
        { key: "id", title: "draw", show: (draw) => html`<a href=${HR.runLink(id, "draw", draw.id)}>${draw.id}</a>` },
        { key: "env", title: "environment", down: false }, { key: "task_key", title: "task", down: false }, { key: "position", title: "position" },
        { key: "state", title: "state", down: false }, { key: "step", title: "step" }, { key: "reason", title: "reason", show: (draw) => text(draw.reason) }, { key: "reward", title: "reward" },
      ]} />`}<//>`;
  };

  HR.pages.draw = ({ id, draw: number_ }) => {
    const state = HR.useData(`/api/runs/${id}/draws/${number_}`);
    return html`<${HR.Loaded} state=${state}>${(draw) => html`
      <${HR.Facts} facts=${[
        ["environment", text(draw.env)], ["task", text(draw.task_key)], ["state", text(draw.state)], ["reason", text(draw.reason)], ["step", number(draw.step)],
        ["rollouts", number(draw.rollouts)], ["tokens", number(draw.tokens)], ["drawn by orchestrator", number(draw.epoch)],
      ]} />
      <h2>Events</h2><ol class="events">${draw.events.map((event, i) => html`<li key=${i} class=${event.what === "restart" || event.what === "dropped" ? "warn" : ""}><b>${text(event.what)}</b>${event.step !== null && html` step ${event.step}`} <span>${text(event.detail)}</span></li>`)}</ol>
      ${draw.rewards.length > 0 && html`<p>Rewards: ${draw.rewards.map(([agent, reward]) => `${agent ? `${text(agent)} ` : ""}${number(reward)}`).join(", ")}</p>`}
      ${Object.keys(draw.drops).length > 0 && html`<p>Dropped: ${Object.entries(draw.drops).map(([reason, count]) => `${text(reason)} ${number(count)}`).join(", ")}</p>`}
      <h2>Rollouts on disk</h2><${HR.Table} label="rollouts" rows=${draw.saved} columns=${[
        { key: "row", title: "rollout", show: (r) => html`<a href=${HR.runLink(id, "step", r.step, "rollout", r.row)}>step ${r.step}, ${r.row}</a>` },
        { key: "reward", title: "reward" }, { key: "version_min", title: "oldest version" }, { key: "version_max", title: "newest version" }, { key: "drop_reason", title: "dropped", show: (r) => text(r.drop_reason) },
      ]} />
      ${draw.same_task.length > 0 && html`<h2>Other draws of this task</h2><${HR.Table} label="draws of this task" rows=${draw.same_task} columns=${[
        { key: "id", title: "draw", show: (d) => html`<a href=${HR.runLink(id, "draw", d.id)}>${d.id}</a>` }, { key: "state", title: "state" }, { key: "step", title: "step" }, { key: "reward", title: "reward" },
      ]} />`}`}<//>`;
  };
})();
