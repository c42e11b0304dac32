"use strict";
/* What all pages use: data of the server or of an export, live events, routes, and text that others wrote.

Every script adds to the one global HR. Names, messages and tokens come from models and users: they are shown through
`HR.text`, as text nodes, and never as markup. */

const HR = { html: htm.bind(preact.h), pages: {}, ...preactHooks };

/* ---- text and numbers ---- */

/* The characters of headrace/safe_text.py: they control a terminal, reorder, hide or cannot be drawn. */
HR.HOSTILE = new RegExp(
  "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb\\ud800-\\udfff\\ufdd0-\\ufdef\\ufffe\\uffff" +
    "\\u{e0000}-\\u{e0fff}]",
  "gu",
);

HR.text = (value) => {
  if (value === null || value === undefined) return "";
  const string = typeof value === "string" ? value : JSON.stringify(value);
  return string.replace(HR.HOSTILE, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x100) return "\\x" + code.toString(16).padStart(2, "0");
    return code < 0x10000 ? "\\u" + code.toString(16).padStart(4, "0") : `\\u{${code.toString(16)}}`;
  });
};

/* The last part of a path, for places with little room. */
HR.fileName = (path) => (path ?? "").replace(/\/+$/, "").split("/").at(-1);

const integers = new Intl.NumberFormat("en");
const fractions = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 }); // toLocaleString would make one per call
HR.number = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return HR.text(value);
  if (Number.isInteger(value)) return integers.format(value);
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-4 ? value.toExponential(2) : fractions.format(value);
};

HR.seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 100) return `${HR.number(Number(value.toPrecision(3)))} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 100 ? `${minutes} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
};

/* ---- data ---- */

const waiting = new Map(); // exports: the functions that wait for a path, until its script has called `receive`
const setup = (window.HEADRACE ||= { mode: "live" });
setup.receive = (path, data) => {
  waiting.get(path)?.(data);
  waiting.delete(path);
};
HR.exported = setup.mode === "export";
const available = new Set(setup.exported);
HR.has = (path) => !HR.exported || available.has(path);

const fromScript = (path) =>
  new Promise((resolve, reject) => {
    if (!available.has(path)) return reject(new Error(`${path}: not part of this export. Open the run with headrace view.`));
    waiting.set(path, resolve);
    const script = document.createElement("script");
    script.src = `data/${path.slice("/api/".length).replace(/[^A-Za-z0-9]+/g, "-")}.js`;
    script.onload = () => script.remove();
    script.onerror = () => reject(new Error(`${script.src}: the file is missing. Export the run again.`));
    document.head.append(script);
  });

const early = new Map(); // requests of the first page, which are sent before anything is drawn

/* Raise an error whose `isFinal` says that asking again does not help: the request was wrong. */
const fromServer = async (path, signal) => {
  const sent = early.get(path);
  early.delete(path); // a request that fails is sent again
  const response = await (sent ?? fetch(path.slice(1), { signal }));
  const data = await response.json();
  if (!response.ok) throw Object.assign(new Error(data.error), { isFinal: response.status < 500 });
  return data;
};
const RETRY_MS = 2000;

HR.load = (path, signal) => (HR.exported ? fromScript(path.replace(/\?.*/, "")) : fromServer(path, signal));

/* Return {data, error} of a path; a changed `version` loads it again and keeps the old data until then. A load that is
going on is finished first: a slow server would never get to an end otherwise. What a live run's files did not allow at
that moment is tried again. */
HR.useData = (path, version = 0) => {
  const [state, setState] = HR.useState({});
  const latest = HR.useRef();
  HR.useEffect(() => {
    const job = (latest.current = { stop: new AbortController() });
    return () => job.stop.abort();
  }, [path]);
  HR.useEffect(() => {
    const job = latest.current;
    const load = async () => {
      if (job.stop.signal.aborted) return;
      Object.assign(job, { isLoading: true, again: false });
      const result = await HR.load(path, job.stop.signal).then((data) => ({ data }), (error) => ({ error }));
      if (job.stop.signal.aborted) return;
      job.isLoading = false;
      setState({ path, ...result });
      if (job.again) load();
      else if (result.error && !result.error.isFinal && !HR.exported) setTimeout(load, RETRY_MS);
    };
    if (job.isLoading) job.again = true;
    else if (path) load();
  }, [path, version]);
  return state.path?.replace(/\?.*/, "") === path?.replace(/\?.*/, "") ? state : {};
};

/* Call `handlers[event](data)` for events of a live run, from a place of its metrics on. The browser reconnects by itself
unless the server refused once. */
HR.useEvents = (path, handlers, offset = "") => {
  const latest = HR.useRef(handlers);
  latest.current = handlers;
  HR.useEffect(() => {
    if (HR.exported || !path) return undefined;
    let source;
    let timer = 0;
    let place = offset;
    const connect = () => {
      source = new EventSource(`${path.slice(1)}?offset=${place}`);
      for (const name of Object.keys(handlers))
        source.addEventListener(name, (event) => {
          place = event.lastEventId || place;
          latest.current[name](JSON.parse(event.data));
        });
      source.onerror = () => {
        if (source.readyState === EventSource.CLOSED) timer = setTimeout(connect, RETRY_MS);
      };
    };
    connect();
    return () => {
      clearTimeout(timer);
      source.close();
    };
  }, [path]);
};

/* Return [count, increase]: increases within `delay` ms count once, so that a fast run does not redraw all the time. */
HR.useThrottledCount = (delay) => {
  const [count, setCount] = HR.useState(0);
  const timer = HR.useRef(0);
  HR.useEffect(() => () => clearTimeout(timer.current), []);
  const increase = () => {
    timer.current ||= setTimeout(() => {
      timer.current = 0;
      setCount((n) => n + 1);
    }, delay);
  };
  return [count, increase];
};

const ARRAYS = { f32: Float32Array, i32: Int32Array, u8: Uint8Array };
HR.array = ({ type, data, fill, length }) => {
  if (data === undefined) return new ARRAYS[type](length).fill(fill);
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return new ARRAYS[type](bytes.buffer);
};

/* Turn {name: [values]} into [{name: value}]. */
HR.rows = (columns) => {
  const names = Object.keys(columns);
  return (columns[names[0]] ?? []).map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
};

/* ---- routes: #/run/ID/step/4?key=value ---- */

HR.route = () => {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
};
HR.go = (hash) => {
  location.hash = hash;
};
HR.runLink = (id, ...parts) => `#/run/${[id, ...parts].map(encodeURIComponent).join("/")}`;

const firstPaths = ([kind, id, page, step, part, row]) => {
  if (!kind) return ["/api/runs"];
  if (kind !== "run") return [];
  const run = `/api/runs/${id}`;
  if (!page) return [run, `${run}/series`, `${run}/evaluation`];
  return page === "step" && part === "rollout" ? [run, `${run}/steps/${step}/rollouts/${row}`] : [run];
};
if (!HR.exported) for (const path of firstPaths(HR.route().parts)) early.set(path, fetch(path.slice(1)));
