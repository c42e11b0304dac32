"use strict";
/* Small components of several pages: loading and errors, tables that sort, long texts, sparklines. */
(() => {
  const { html, text, number, useMemo, useState, useEffect, useLayoutEffect, useRef } = HR;

  /* Show `children(data)`, or why there are none. */
  HR.Loaded = ({ state, children }) => {
    if (state.error) return html`<p class="error" role="alert">${text(state.error.message)}</p>`;
    return state.data ? children(state.data) : html`<p class="muted loading" role="status">Loading …</p>`;
  };

  /* The title of a page takes the focus when its page was opened by a link: screen readers read it, Tab goes on from it. */
  HR.Title = ({ children }) => {
    const title = useRef();
    useEffect(() => {
      if (HR.navigated) title.current.focus({ preventScroll: true });
    }, [location.hash]);
    return html`<h1 ref=${title} tabindex="-1">${children}</h1>`;
  };

  HR.Facts = ({ facts }) =>
    html`<dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${text(name)}</dt><dd>${value}</dd></div>`)}</dl>`;

  const collator = new Intl.Collator("en", { numeric: true });
  const order = (a, b) => {
    const missing = (value) => value === null || value === undefined || value === "";
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    return typeof a === "number" && typeof b === "number" ? a - b : collator.compare(String(a), String(b));
  };

  const MORE_ROWS = 60;
  /* columns: [{key, title, value(row), show(row), sorts}]. Missing values come last in either direction. Rows are added
  as the end of the table comes near. */
  HR.Table = ({ label, columns, rows, first = null, descending = false, id = null }) => {
    const [sort, setSort] = useState({ key: first, down: descending });
    const [limit, setLimit] = useState(MORE_ROWS);
    const end = useRef();
    const sorted = useMemo(() => {
      const column = columns.find((c) => c.key === sort.key);
      if (!column) return rows;
      const value = column.value ?? ((row) => row[column.key]);
      const missing = (row) => value(row) === null || value(row) === undefined || value(row) === "";
      const present = rows.filter((row) => !missing(row)).sort((a, b) => order(value(a), value(b)) * (sort.down ? -1 : 1));
      return [...present, ...rows.filter(missing)];
    }, [rows, columns, sort]);
    useEffect(() => {
      if (!end.current) return undefined;
      const observer = new IntersectionObserver(([entry]) => entry.isIntersecting && setLimit(limit + MORE_ROWS), { rootMargin: "1500px" });
      observer.observe(end.current);
      return () => observer.disconnect();
    }, [limit, limit < sorted.length]);
    const head = (c) => {
      const active = sort.key === c.key;
      const press = () => setSort({ key: c.key, down: active ? !sort.down : c.down ?? true });
      return html`<th key=${c.key} scope="col" aria-sort=${active ? (sort.down ? "descending" : "ascending") : undefined}>
        ${c.sorts === false ? text(c.title) : html`<button onClick=${press}>${text(c.title)}<i aria-hidden="true">${active ? (sort.down ? "▾" : "▴") : ""}</i></button>`}</th>`;
    };
    const cell = (c, row) => {
      const value = c.show ? c.show(row) : row[c.key];
      const isNumber = typeof value === "number" || value === null || value === undefined;
      return html`<td key=${c.key} class=${isNumber || c.right ? "right" : ""}>${isNumber ? number(value) : typeof value === "string" ? text(value) : value}</td>`;
    };
    const lines = useMemo(() => new Map(), [columns]); // an unchanged row is not compared again when others are added
    const line = (row) => {
      if (!lines.has(row)) lines.set(row, html`<tr key=${id ? id(row) : lines.size}>${columns.map((c) => cell(c, row))}</tr>`);
      return lines.get(row);
    };
    return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table>
      <thead><tr>${columns.map(head)}</tr></thead>
      <tbody>${sorted.slice(0, limit).map(line)}</tbody>
    </table>${limit < sorted.length && html`<p ref=${end} class="muted">${number(sorted.length - limit)} more rows</p>`}</div>`;
  };

  const BLOCK_CHARACTERS = 8000;
  /* A text of any length: blocks that the browser lays out only near the visible part, cut at line ends where possible. */
  HR.LongText = ({ value }) => {
    const blocks = useMemo(() => {
      const shown = text(value);
      const cut = [];
      for (let start = 0; start < shown.length; ) {
        let end = Math.min(start + BLOCK_CHARACTERS, shown.length);
        const newline = shown.lastIndexOf("\n", end);
        if (end < shown.length && newline > start) end = newline + 1;
        else if (/[\ud800-\udbff]/.test(shown[end - 1])) end -= 1;
        cut.push(shown.slice(start, end));
        start = end;
      }
      return cut;
    }, [value]);
    return html`<div class="text">${blocks.map((block, i) => html`<div key=${i} class="block">${block}</div>`)}</div>`;
  };

  HR.Sparkline = ({ values }) => {
    const known = values.filter((v) => v !== null);
    if (known.length < 2) return "";
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const point = (v, i) => `${((i / (values.length - 1)) * 98 + 1).toFixed(1)},${(19 - ((v - low) / (high - low || 1)) * 18).toFixed(1)}`;
    const points = values.map((v, i) => (v === null ? null : point(v, i))).filter(Boolean);
    return html`<svg class="spark" viewBox="0 0 100 20" role="img" aria-label=${`from ${number(known[0])} to ${number(known.at(-1))}`}>
      <polyline points=${points.join(" ")} /></svg>`;
  };

  HR.State = ({ state }) => html`<span class=${`state ${["running", "finished", "failed", "silent"].includes(state) ? state : ""}`}>${text(state)}</span>`;

  HR.Select = ({ label, value, options, onChange }) =>
    html`<label>${text(label)} <select value=${value} onChange=${(e) => onChange(e.target.value)}>
      ${options.map(([key, title]) => html`<option key=${key} value=${key} selected=${String(key) === String(value)}>${text(String(title))}</option>`)}</select></label>`;

  /* Keys that work anywhere except in inputs: {"[": handler}. */
  HR.useKeys = (handlers) => {
    const latest = useRef(handlers);
    latest.current = handlers;
    // Installed with the new content, not after it is painted: a key that is pressed in between would be lost.
    useLayoutEffect(() => {
      const press = (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea")) return;
        const handler = latest.current[event.key];
        if (handler) {
          event.preventDefault();
          handler();
        }
      };
      addEventListener("keydown", press);
      return () => removeEventListener("keydown", press);
    }, []);
  };

  /* Return [ref, seen]: whether the element has been near the visible part. */
  HR.useSeen = () => {
    const ref = useRef();
    const [seen, setSeen] = useState(false);
    useEffect(() => {
      const observer = new IntersectionObserver(([entry]) => entry.isIntersecting && setSeen(true), { rootMargin: "400px" });
      observer.observe(ref.current);
      return () => observer.disconnect();
    }, []);
    return [ref, seen];
  };
})();
