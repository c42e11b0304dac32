"use strict";
/* The frame around all pages: route, breadcrumbs, tabs, and the live state of the run. */
(() => {
  const { html, text, number, useEffect, useState, useErrorBoundary } = HR;

  const REDRAW_MS = 1500; // at most this often while a run goes on
  const TABS = [["", "Overview"], ["steps", "Steps"], ["evaluation", "Evaluation"], ["draws", "Draws"], ["search", "Search"], ["settings", "Settings"]];

  /* Return the page of a run's route, its tab and the breadcrumbs after the run. */
  const choose = (parts) => {
    const [kind, first, second, third] = parts;
    const step = Number(first);
    if (!kind) return { page: "run", tab: "", crumbs: [] };
    if (kind === "step" && second === "group") return { page: "group", tab: "steps", step, group: Number(third), crumbs: [[`step ${step}`, ["step", step]], [`group ${third}`]] };
    if (kind === "step" && second === "rollout") return { page: "rollout", tab: "steps", step, row: Number(third), crumbs: [[`step ${step}`, ["step", step]], [`rollout ${third}`]] };
    if (kind === "step") return { page: "step", tab: "steps", step, crumbs: [[`step ${step}`]] };
    if (kind === "evaluation" && second === "rollout") return { page: "rollout", tab: "evaluation", evaluation: true, step, row: Number(third), crumbs: [[`evaluation of version ${step}`, ["evaluation"]], [`rollout ${third}`]] };
    if (kind === "draw") return { page: "draw", tab: "draws", draw: step, crumbs: [["draws", ["draws"]], [`draw ${step}`]] };
    return TABS.some(([name]) => name === kind) ? { page: kind, tab: kind, crumbs: [] } : null;
  };

  const NotFound = () => html`<p class="error" role="alert">${text(location.hash)}: no such page. <a href="#/">All runs</a></p>`;

  /* Data of a run that every page of it needs, kept current by its events. */
  const useRun = (id) => {
    const state = HR.useData(`/api/runs/${id}`);
    const [live, setLive] = useState({});
    const [version, increase] = HR.useThrottledCount(REDRAW_MS);
    HR.useEvents(state.data ? `/api/runs/${id}/events` : null, {
      status: (status) => setLive((old) => ({ ...old, ...status })),
      files: (files) => setLive((old) => ({ ...old, ...files })),
      metrics: ({ records }) => {
        setLive((old) => ({ ...old, step: Math.max(old.step ?? 0, state.data.step ?? 0, ...records.map((r) => r.step ?? 0)) }));
        increase();
      },
    }, state.data?.offset);
    return state.data ? { ...state, data: { ...state.data, ...live, version } } : state;
  };

  const Run = ({ id, parts, query }) => {
    const state = useRun(id);
    const chosen = choose(parts);
    const tabs = TABS.filter(([name]) => !(HR.exported && name === "search") && !(name === "draws" && state.data && !state.data.journal));
    const title = chosen?.crumbs.at(-1)?.[0];
    useEffect(() => {
      if (state.data) document.title = `${title ? `${title} · ` : ""}${text(state.data.name)} · headrace`;
    }, [state.data?.name, title]);
    return html`<${HR.Loaded} state=${state}>${(run) => html`
      <nav aria-label="breadcrumbs" class="crumbs"><a href="#/">Runs</a> / ${title ? html`<a href=${HR.runLink(id)}>${text(run.name)}</a>` : text(run.name)}
        ${chosen?.crumbs.map(([name, target]) => html` / ${target ? html`<a href=${HR.runLink(id, ...target)}>${text(name)}</a>` : text(name)}`)}</nav>
      <${HR.Title}>${text(title ?? run.name)} <small><${HR.State} state=${run.state} /> step ${number(run.step)}${run.max_steps ? ` of ${number(run.max_steps)}` : ""} · <span title=${text(run.model)}>${text(HR.fileName(run.model))}</span></small><//>
      <${HR.Banner} run=${run} />
      <nav aria-label="pages of the run" class="tabs">${tabs.map(([name, label]) => html`<a key=${name} href=${name ? HR.runLink(id, name) : HR.runLink(id)} aria-current=${chosen?.tab === name ? "page" : undefined}>${label}</a>`)}</nav>
      ${chosen ? html`<${HR.pages[chosen.page]} key=${`${chosen.page} ${chosen.step} ${chosen.row} ${chosen.group} ${chosen.draw}`} run=${run} id=${id} query=${query} ...${chosen} />` : html`<${NotFound} />`}`}<//>`;
  };

  const App = () => {
    const [route, setRoute] = useState(HR.route());
    const [error, clear] = useErrorBoundary((failure) => console.error(failure));
    useEffect(() => {
      const change = () => {
        clear();
        HR.navigated = true;
        setRoute(HR.route());
        scrollTo(0, 0);
      };
      addEventListener("hashchange", change);
      return () => removeEventListener("hashchange", change);
    }, []);
    HR.useKeys({ "/": () => document.querySelector("input[type=search]")?.focus() });
    const [kind, id, ...parts] = route.parts;
    const page = () => {
      if (error) return html`<p class="error" role="alert">The page failed: ${text(String(error.message ?? error))}. <a href="#/">All runs</a></p>`;
      if (!kind) return html`<${HR.pages.runs} />`;
      if (kind === "run" && id) return html`<${Run} key=${id} id=${id} parts=${parts} query=${route.query} />`;
      if (kind === "compare" && id) return html`<${HR.pages.compare} key=${id} ids=${id.split(",")} />`;
      return html`<${NotFound} />`;
    };
    return html`<a class="skip" href="#main" onClick=${(e) => (e.preventDefault(), document.querySelector("main").focus())}>Skip to the content</a>
      <main tabindex="-1">${page()}</main>
      <footer class="muted">Keys: / search, [ previous, ] next. ${HR.exported ? "Exported files." : "Nothing leaves this machine."}</footer>`;
  };

  preact.render(html`<${App} />`, document.getElementById("page"));
})();
