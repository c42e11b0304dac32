"use strict";
/* All runs of a folder. */
(() => {
  const { html, text, number, seconds, useMemo, useState, useEffect } = HR;
  const MAX_SETTINGS = 6; // columns; the others are on the page that compares

  const value = (setting) => (setting === null || setting === undefined ? "" : typeof setting === "string" ? setting : JSON.stringify(setting));

  HR.pages.runs = () => {
    const state = HR.useData("/api/runs");
    const settings = HR.useData(state.data && HR.has("/api/settings") ? "/api/settings" : null).data; // slower than the list
    const [changed, setChanged] = useState({});
    const [chosen, setChosen] = useState([]);
    const [filter, setFilter] = useState("");
    HR.useEvents(state.data && !state.data.single ? "/api/events" : null, {
      runs: ({ runs }) => setChanged((old) => ({ ...old, ...Object.fromEntries(runs.map((run) => [run.id, run])) })),
    });
    useEffect(() => {
      if (state.data?.single && state.data.runs.length) location.replace(HR.runLink(state.data.runs[0].id));
    }, [state.data]);

    const rows = useMemo(() => {
      const known = new Set(state.data?.runs.map((run) => run.id));
      const all = [...(state.data?.runs ?? []), ...Object.values(changed).filter((run) => !known.has(run.id))];
      const merged = all.map((run) => {
        const late = settings?.runs?.[run.id] ?? {};
        const current = changed[run.id] ?? run;
        return { ...current, model: current.model ?? late.model, algorithm: current.algorithm ?? late.algorithm, max_steps: current.max_steps ?? late.max_steps, settings: settings?.values?.[run.id] ?? [] };
      });
      return merged.filter((run) => `${run.name} ${run.model} ${run.algorithm} ${run.state}`.toLowerCase().includes(filter.toLowerCase()));
    }, [state.data, changed, settings, filter]);

    const columns = useMemo(() => {
      const choose = (id) => setChosen((old) => (old.includes(id) ? old.filter((other) => other !== id) : [...old, id]));
      const keys = (settings?.keys ?? []).slice(0, MAX_SETTINGS);
      return [
        { key: "choose", title: "", sorts: false, show: (run) => html`<input type="checkbox" aria-label=${`compare ${text(run.name)}`} checked=${chosen.includes(run.id)} onChange=${() => choose(run.id)} />` },
        { key: "name", title: "run", down: false, show: (run) => html`<a href=${HR.runLink(run.id)}>${text(run.name)}</a>` },
        { key: "state", title: "state", down: false, show: (run) => html`<span title=${text(run.problem)}><${HR.State} state=${run.state} /></span>` },
        { key: "step", title: "step", right: true, show: (run) => `${number(run.step)}${run.max_steps ? ` / ${number(run.max_steps)}` : ""}` },
        { key: "sparkline", title: "reward over steps", sorts: false, show: (run) => html`<${HR.Sparkline} values=${run.sparkline ?? []} />` },
        { key: "reward_end", title: "reward", show: (run) => html`<span title=${text(run.reward_name)}>${number(run.reward_end)}</span>`, right: true },
        { key: "gain", title: "gain", value: (run) => (run.reward_end === null || run.reward_start === null ? null : run.reward_end - run.reward_start), right: true, show: (run) => (run.reward_end === null || run.reward_start === null ? null : run.reward_end - run.reward_start) },
        { key: "seconds", title: "time", right: true, show: (run) => seconds(run.seconds) },
        { key: "updated", title: "updated", right: true, show: (run) => (run.updated ? new Date(run.updated * 1000).toISOString().slice(0, 16).replace("T", " ") : "") },
        { key: "model", title: "model", down: false, show: (run) => html`<span title=${text(run.model)}>${text(HR.fileName(run.model))}</span>` },
        { key: "algorithm", title: "algorithm", down: false, show: (run) => text(run.algorithm) },
        ...keys.map((key, i) => ({ key: `setting ${key}`, title: key, value: (run) => run.settings[i], show: (run) => text(value(run.settings[i])) })),
      ];
    }, [settings, chosen]);

    return html`<${HR.Loaded} state=${state}>${(data) => html`
      <${HR.Title}>Runs <small>${text(data.folder)}</small><//>
      <div class="bar"><label>filter <input type="search" value=${filter} onInput=${(e) => setFilter(e.target.value)} /></label>
        <span class="muted" role="status">${number(rows.length)} of ${number(data.runs.length)} runs</span>
        <button disabled=${chosen.length < 2} onClick=${() => HR.go(`#/compare/${chosen.join(",")}`)}>Compare ${chosen.length || ""} runs</button>
        ${settings?.keys?.length > MAX_SETTINGS && html`<span class="muted">${settings.keys.length - MAX_SETTINGS} more settings differ: compare two runs to see them</span>`}</div>
      <${HR.Table} label="runs" columns=${columns} rows=${rows} first="updated" descending=${true} id=${(run) => run.id} />`}<//>`;
  };
})();
