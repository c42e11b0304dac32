"use strict";
/* A histogram over steps as a heat map on a canvas: a column per range of steps, a row per bin, low values below. */
(() => {
  const { html, text, number, useEffect, useRef, useState } = HR;
  const TITLES = { advantages: "Advantages of rollouts", decode_len: "Sampled tokens of rollouts", ratio: "Ratio of trained tokens" };
  const MARGIN = 58; // as the axis of charts

  HR.HeatMap = ({ name, bounds, step, counts, marks = [], height = 170 }) => {
    const canvas = useRef();
    const [at, setAt] = useState("");
    const used = counts[0].map((_, bin) => counts.some((column) => column[bin] > 0));
    const [low, high] = [used.indexOf(true), used.lastIndexOf(true)];
    const rows = high - low + 1;
    const range = (bin) => `${bin ? number(bounds[bin - 1]) : "below"} to ${bin < bounds.length ? number(bounds[bin]) : "above"}`;

    const draw = () => {
      const { clientWidth: width } = canvas.current;
      const scale = devicePixelRatio || 1;
      Object.assign(canvas.current, { width: width * scale, height: height * scale });
      const context = canvas.current.getContext("2d");
      context.scale(scale, scale);
      const style = getComputedStyle(document.documentElement);
      const [w, h] = [(width - MARGIN) / counts.length, height / rows];
      context.fillStyle = style.getPropertyValue("--link");
      counts.forEach((column, x) => {
        const total = column.reduce((sum, count) => sum + count, 0) || 1;
        for (let bin = low; bin <= high; bin++) {
          context.globalAlpha = Math.sqrt(column[bin] / total);
          context.fillRect(MARGIN + x * w, height - (bin - low + 1) * h, w + 0.5, h);
        }
      });
      context.globalAlpha = 1;
      context.fillStyle = style.getPropertyValue("--warn");
      for (const mark of marks) {
        const x = step.findLastIndex((s) => s <= mark);
        if (x >= 0) context.fillRect(MARGIN + (x + 0.5) * w - 1, 0, 2, height);
      }
      context.fillStyle = style.getPropertyValue("--muted");
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "middle";
      const every = Math.ceil(rows / Math.floor(height / 16));
      for (let bin = low; bin < Math.min(high, bounds.length); bin += every) context.fillText(number(bounds[bin]), 2, height - (bin - low + 1) * h);
    };
    useEffect(() => {
      draw();
      const observer = new ResizeObserver(draw);
      observer.observe(canvas.current);
      return () => observer.disconnect();
    }, [counts, marks]);
    const hover = (event) => {
      const box = canvas.current.getBoundingClientRect();
      const x = Math.floor(((event.clientX - box.left - MARGIN) / (box.width - MARGIN)) * counts.length);
      const bin = low + Math.floor((1 - (event.clientY - box.top) / box.height) * rows);
      setAt(counts[x]?.[bin] === undefined ? "" : `step ${number(step[x])}: ${number(counts[x][bin])} from ${range(bin)}`);
    };
    return html`<figure class="chart"><figcaption><b>${text(TITLES[name] ?? name)}</b> <span class="muted">${at}</span></figcaption>
      <canvas ref=${canvas} class="heat" style=${{ height: `${height}px` }} role="img" aria-label=${`histogram of ${text(name)} over ${number(counts.length)} columns of steps`}
        onMouseMove=${hover} onMouseLeave=${() => setAt("")}></canvas></figure>`;
  };
})();
