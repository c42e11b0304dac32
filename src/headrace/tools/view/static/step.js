"use strict";
/* The rollouts of a step by groups, and one group side by side. */
(() => {
  const { html, text, number, seconds, useEffect, useMemo, useState } = HR;

  const outcome = (rollout) => rollout.drop_reason || rollout.error_reason || (rollout.trainable ? "trained" : "not trained");

  HR.pages.step = ({ run, id, step }) => {
    const state = HR.useData(`/api/runs/${id}/steps/${step}`);
    const at = run.steps.indexOf(step);
    const move = (by) => run.steps[at + by] !== undefined && HR.go(HR.runLink(id, "step", run.steps[at + by]));
    HR.useKeys({ "[": () => move(-1), "]": () => move(1) });
    const rows = useMemo(() => state.data && HR.rows(state.data.rollouts), [state.data]);
    const columns = [
      { key: "row", title: "rollout", down: false, show: (r) => html`<a href=${HR.runLink(id, "step", step, "rollout", r.row)}>${r.row}</a>` },
      { key: "group", title: "group", down: false, show: (r) => html`<a href=${HR.runLink(id, "step", step, "group", r.group)}>${r.group}</a>` },
      { key: "reward", title: "reward" },
      { key: "advantage", title: "advantage" },
      { key: "tokens", title: "tokens" },
      { key: "turns", title: "turns" },
      { key: "version_min", title: "versions", right: true, show: (r) => (r.version_min === r.version_max ? number(r.version_min) : `${r.version_min}–${r.version_max}`) },
      { key: "seconds", title: "time", right: true, show: (r) => seconds(r.seconds) },
      { key: "outcome", title: "outcome", value: outcome, show: (r) => text(outcome(r)) },
      { key: "preview", title: "answer", sorts: false, show: (r) => html`<span class="preview">${text(r.preview)}</span>` },
    ];
    return html`<div class="bar"><button disabled=${at <= 0} onClick=${() => move(-1)}>previous step [</button><button disabled=${at < 0 || at + 1 >= run.steps.length} onClick=${() => move(1)}>next step ]</button></div>
      <${HR.Loaded} state=${state}>${(data) => html`
        <h2>Groups</h2>
        <${HR.Table} label="groups" rows=${data.groups} id=${(g) => g.index} columns=${[
          { key: "index", title: "group", down: false, show: (g) => html`<a href=${HR.runLink(id, "step", step, "group", g.index)}>${g.index}</a>` },
          { key: "env", title: "environment", down: false },
          { key: "task_key", title: "task", down: false },
          { key: "draw", title: "draw", show: (g) => (run.journal ? html`<a href=${HR.runLink(id, "draw", g.draw)}>${g.draw}</a>` : g.draw) },
          { key: "rows", title: "rollouts", value: (g) => g.rows.length, show: (g) => g.rows.length },
          { key: "mean", title: "mean reward" },
          { key: "std", title: "std" },
        ]} />
        <h2>Rollouts</h2>
        <${HR.Table} label="rollouts" rows=${rows} columns=${columns} id=${(r) => r.row} first="reward" descending=${true} />
        <details><summary>Metrics of this step</summary><${HR.Facts} facts=${Object.entries(data.metrics).map(([name, value]) => [name, number(value)])} /></details>`}<//>`;
  };

  /* Load the rollouts one after another: each is shown as soon as it is there. */
  const useRollouts = (id, step, rows) => {
    const [loaded, setLoaded] = useState({});
    useEffect(() => {
      const stop = new AbortController();
      const load = async () => {
        for (const row of rows) {
          const result = await HR.load(`/api/runs/${id}/steps/${step}/rollouts/${row}`, stop.signal).then((data) => ({ data }), (error) => ({ error }));
          if (stop.signal.aborted) return;
          setLoaded((old) => ({ ...old, [row]: result }));
        }
      };
      load();
      return () => stop.abort();
    }, [id, step, rows]);
    return loaded;
  };

  HR.pages.group = ({ id, step, group: index }) => {
    const state = HR.useData(`/api/runs/${id}/steps/${step}`);
    return html`<${HR.Loaded} state=${state}>${(data) => {
      const group = data.groups.find((g) => g.index === index);
      return group ? html`<${Group} ...${{ id, step, group, data }} />` : html`<p class="error">group = ${text(String(index))}: not a group of this step.</p>`;
    }}<//>`;
  };

  const Group = ({ id, step, group, data }) => {
    const loaded = useRollouts(id, step, group.rows);
    const byRow = useMemo(() => new Map(HR.rows(data.rollouts).map((r) => [r.row, r])), [data]);
    const move = (by) => data.groups[group.index + by] && HR.go(HR.runLink(id, "step", step, "group", group.index + by));
    HR.useKeys({ "[": () => move(-1), "]": () => move(1) });
    const conversations = group.rows.map((row) => loaded[row]?.data?.messages).filter(Boolean);
    const isShared = (i) => conversations.length === group.rows.length && conversations.every((messages) => JSON.stringify(messages[i]) === JSON.stringify(conversations[0][i]));
    let shared = 0;
    while (conversations.length && shared < conversations[0].length && conversations[0][shared].role !== "assistant" && isShared(shared)) shared += 1;
    return html`<${HR.Facts} facts=${[["environment", text(group.env)], ["task", text(group.task_key)], ["mean reward", number(group.mean)], ["std", number(group.std)]]} />
      <p class="muted">Best reward first. Keys: [ previous group, ] next group.</p>
      ${shared > 0 && html`<h2>Prompt</h2><${HR.Messages} messages=${conversations[0].slice(0, shared)} />`}
      <h2>Rollouts</h2>
      <div class="side-by-side" tabindex="0" role="region" aria-label="rollouts of the group">${group.rows.map((row) => {
        const r = byRow.get(row);
        return html`<section key=${row} class="card"><h3><a href=${HR.runLink(id, "step", step, "rollout", row)}>reward ${number(r.reward)}</a></h3>
          <p class="muted">advantage ${number(r.advantage)} · ${number(r.tokens)} tokens · ${text(outcome(r))}</p>
          <${HR.Loaded} state=${loaded[row] ?? {}}>${(rollout) => html`<${HR.Messages} messages=${rollout.messages.slice(shared)} />`}<//></section>`;
      })}</div>`;
  };
})();
