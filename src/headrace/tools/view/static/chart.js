"use strict";
/* Charts by uPlot: lines with bands or stacked bars, one crosshair and one range of steps for all charts of a page. */
(() => {
  const { html, text, number, useEffect, useMemo, useRef, useState } = HR;

  const COLORS = ["#2a7fd4", "#e07b1a", "#2f9e56", "#d0434b", "#8a5cd0", "#a5702f", "#d565ae", "#6f7b85", "#98a51d", "#18a5b8"];
  const KIND_COLORS = { wait: ["#e9a23b", "#f0bd74", "#c9862b"], work: ["#2a7fd4", "#2f9e56", "#8a5cd0", "#18a5b8", "#5a9be0", "#6bbd88"], other: ["#9aa3ab", "#b9c0c6", "#7d868e"] };
  const WHOLE_STEPS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((n) => [n, 2 * n, 5 * n]);
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dark = matchMedia("(prefers-color-scheme: dark)");

  /* Exponential moving average whose first values are not pulled to zero. */
  const smoothed = (values, factor) => {
    let sum = 0;
    let weight = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = factor * sum + (1 - factor) * value;
      weight = factor * weight + (1 - factor);
      return sum / weight;
    });
  };

  /* lines: [{name, x, y, low?, high?, faint?, color?}] -> uPlot's aligned data, series and bands. */
  const plan = (lines, { smoothing, log }) => {
    const positive = (values) => (log ? values.map((v) => (v > 0 ? v : null)) : values);
    const tables = [];
    const series = [{}];
    const bands = [];
    lines.forEach((line, i) => {
      const color = line.color ?? COLORS[i % COLORS.length];
      const columns = [];
      const add = (values, options) => {
        columns.push(positive(values));
        series.push({ label: line.name, spanGaps: true, points: { show: line.x.length < 60, size: 4 }, line: i, ...options });
      };
      if (line.low) {
        add(line.high, { stroke: "transparent", width: 0, points: { show: false }, bound: true });
        add(line.low, { stroke: "transparent", width: 0, points: { show: false }, bound: true });
        bands.push({ series: [series.length - 2, series.length - 1], fill: color + "33" });
      }
      if (smoothing > 0) add(line.y, { stroke: color + "44", width: 1, points: { show: false }, bound: true });
      add(smoothing > 0 ? smoothed(line.y, smoothing) : line.y, { stroke: color, width: line.faint ? 1 : 1.6 });
      tables.push([line.x, ...columns]);
    });
    return { data: tables.length ? uPlot.join(tables) : [[]], series, bands };
  };

  /* Bars on top of each other: each series is drawn from 0 to the sum up to it, the highest first. */
  const planStack = (parts, x) => {
    const sums = [];
    parts.reduce((below, part) => {
      const sum = part.y.map((value, i) => (below[i] ?? 0) + (value ?? 0));
      sums.push(sum);
      return sum;
    }, []);
    const series = [{}];
    [...parts.keys()].reverse().forEach((i) =>
      series.push({ label: parts[i].name, fill: parts[i].color, width: 0, stroke: parts[i].color, points: { show: false }, line: i, paths: uPlot.paths.bars({ size: [0.95], gap: 0 }) }),
    );
    return { data: [x, ...sums.reverse()], series, bands: [], margin: x.length > 1 ? (x[1] - x[0]) / 2 : 0.5 };
  };

  const axis = (extra) => ({ stroke: variable("--muted"), grid: { stroke: variable("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", ...extra });

  const options = ({ planned, width, height, log, range, onZoom, onCursor, sync, xLabel, marks }) => ({
    width,
    height,
    series: planned.series,
    bands: planned.bands,
    legend: { show: false },
    cursor: {
      sync: sync ? { key: sync, setSeries: false } : undefined,
      drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => onZoom?.(null) },
      points: { size: 5 },
    },
    scales: {
      x: { time: false, range: (_, low, high) => range.current ?? (low === high ? [low - 1, high + 1] : [low - (planned.margin ?? 0), high + (planned.margin ?? 0)]) },
      y: { distr: log ? 3 : 1 },
    },
    axes: [axis({ size: 26, incrs: WHOLE_STEPS, values: (_, ticks) => ticks.map(number), label: xLabel, labelSize: 18 }), axis({ size: 58, values: (_, ticks) => ticks.map((v) => (v === null ? "" : number(v))) })],
    hooks: {
      setSelect: [
        (u) => {
          if (u.select.width < 4) return;
          onZoom?.([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        },
      ],
      setCursor: [(u) => onCursor(u.cursor.idx)],
      draw: [
        (u) => {
          u.ctx.save();
          u.ctx.fillStyle = variable("--warn");
          for (const step of marks.current ?? []) {
            const x = u.valToPos(step, "x", true);
            if (x >= u.bbox.left && x <= u.bbox.left + u.bbox.width) u.ctx.fillRect(x - 1, u.bbox.top, 2, u.bbox.height);
          }
          u.ctx.restore();
        },
      ],
    },
  });

  /* One chart. lines: [{name, x, y, low, high}]; with `stack`: bars on top of each other, all with the same x. */
  HR.Chart = ({ title, lines, stack = false, unit = "", height = 170, smoothing = 0, log = false, zoom = null, onZoom, sync, xLabel, marks }) => {
    const [place, seen] = HR.useSeen();
    const plot = useRef();
    const range = useRef(zoom);
    const values = useRef([]);
    const heading = useRef();
    const [hidden, setHidden] = useState([]);
    const [theme, setTheme] = useState(dark.matches);
    const planned = useMemo(() => {
      const shown = lines.map((line, i) => ({ color: COLORS[i % COLORS.length], ...line })).filter((_, i) => !hidden.includes(i));
      return stack ? planStack(shown, lines[0]?.x ?? []) : plan(shown, { smoothing, log });
    }, [lines, smoothing, log, stack, hidden]);
    const shape = `${planned.series.map((s) => `${s.label} ${s.stroke} ${s.points?.show}`).join("|")} ${log} ${theme}`;

    const showValues = (index) => {
      const { data, series } = planRef.current;
      heading.current.textContent = index === null || index === undefined ? "" : `at ${number(data[0][index])}`;
      const at = new Map();
      series.forEach((s, i) => !s.bound && i && at.set(s.label, stack ? undefined : data[i][index]));
      lines.forEach((line, i) => {
        const value = stack ? line.y[index] : at.get(line.name);
        if (values.current[i]) values.current[i].textContent = value === undefined || value === null ? "" : `${number(value)}${unit && ` ${unit}`}`;
      });
    };
    const planRef = useRef();
    planRef.current = planned;
    const showRef = useRef();
    showRef.current = showValues;
    const zoomRef = useRef();
    zoomRef.current = onZoom;
    const marksRef = useRef();
    marksRef.current = marks;

    useEffect(() => {
      const change = () => setTheme(dark.matches);
      dark.addEventListener("change", change);
      return () => dark.removeEventListener("change", change);
    }, []);
    useEffect(() => {
      if (!seen) return undefined;
      const width = place.current.clientWidth;
      const u = new uPlot(
        options({ planned, width, height, log, range, marks: marksRef, sync, xLabel, onZoom: (r) => zoomRef.current?.(r), onCursor: (i) => showRef.current(i) }),
        planned.data,
        place.current,
      );
      plot.current = { u, data: planned.data };
      const observer = new ResizeObserver(() => u.width !== place.current.clientWidth && u.setSize({ width: place.current.clientWidth, height }));
      observer.observe(place.current);
      return () => {
        observer.disconnect();
        u.destroy();
        plot.current = null;
      };
    }, [seen, shape]);
    useEffect(() => {
      range.current = zoom;
      if (plot.current) plot.current.u.setData(planned.data);
    }, [planned, zoom?.[0], zoom?.[1], marks]);

    const toggle = (i) => setHidden(hidden.includes(i) ? hidden.filter((h) => h !== i) : [...hidden, i]);
    return html`<figure class="chart">
      <figcaption><b>${text(title)}</b> <span ref=${heading} class="muted"></span></figcaption>
      <div ref=${place} class="plot" data-height=${height} style=${{ minHeight: `${height}px` }}></div>
      <ul class="legend">${lines.map(
        (line, i) => html`<li key=${line.name}><button aria-pressed=${!hidden.includes(i)} onClick=${() => toggle(i)}>
          <i style=${{ background: line.color ?? COLORS[i % COLORS.length] }}></i>${text(line.name)}</button> <span ref=${(el) => (values.current[i] = el)}></span></li>`,
      )}</ul>
    </figure>`;
  };

  HR.laneLines = ({ step, lanes }) =>
    lanes.map((lane) => {
      const seen = { wait: 0, work: 0, other: 0 };
      const color = (kind) => KIND_COLORS[kind][seen[kind]++ % KIND_COLORS[kind].length];
      const parts = lane.parts.map((part) => ({ name: `${part.name}${part.kind === "wait" ? " (waiting)" : ""}`, x: step, y: part.seconds, color: color(part.kind) }));
      return { process: lane.process, lines: parts };
    });
})();
