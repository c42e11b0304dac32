"use strict";
/* The tokens of a sample, each coloured by a chosen number.

A block of some hundred tokens is plain text until it comes near the visible part; then each of its tokens becomes an
element with a colour. So a rollout of 100,000 tokens opens at once, and the browser's own search finds all of it. */
(() => {
  const { html, text, number, useEffect, useMemo, useRef, useState } = HR;
  const BLOCK_TOKENS = 200; // a block ends at the next line end after this many
  const MAX_BLOCK_TOKENS = 400;
  const MAX_TOKEN_CHARACTERS = 2000; // a hostile vocabulary may have a token of megabytes
  const CATEGORY_COLORS = ["#2a7fd455", "#e07b1a55", "#2f9e5655", "#d0434b55", "#8a5cd055", "#a5702f55", "#18a5b855", "#98a51d55"];

  const shownToken = (token, id) => {
    if (!token) return `[${id}]`; // unknown, or an end marker without text
    return text(token.length > MAX_TOKEN_CHARACTERS ? `${token.slice(0, MAX_TOKEN_CHARACTERS)}…` : token).replace(/\n/g, "↵\n");
  };

  /* Return the texts of all tokens and the blocks [start, end). */
  const layOut = (sample) => {
    const ids = HR.array(sample.ids);
    const texts = Array.from(ids, (id, i) => shownToken(sample.text ? sample.text[i] : null, id));
    const blocks = [];
    for (let start = 0; start < texts.length; ) {
      let end = Math.min(start + BLOCK_TOKENS, texts.length);
      while (end < texts.length && end - start < MAX_BLOCK_TOKENS && !texts[end - 1].endsWith("\n")) end += 1;
      blocks.push([start, end]);
      start = end;
    }
    return { ids, texts, blocks };
  };

  /* Return a function from a value to a background. The scale ends at the 99th percentile, so one outlier hides nothing. */
  const colorScale = (column, values) => {
    if (!values) return () => "";
    if (column.scale === "ratio") {
      const color = colorScale({ scale: "diverging" }, values.map(Math.log)); // a ratio of 1 has no colour
      return (v) => color(Math.log(v));
    }
    if (column.scale === "category") return (v) => (v < 0 || Number.isNaN(v) ? "" : CATEGORY_COLORS[v % CATEGORY_COLORS.length]);
    const sizes = Float32Array.from(values).filter(Number.isFinite).map(Math.abs).filter((v) => v > 0).sort();
    const end = sizes.length ? sizes[Math.floor((sizes.length - 1) * 0.99)] : 1;
    const [positive, negative] = column.scale === "diverging" ? ["46, 140, 80", "214, 60, 66"] : ["146, 84, 214", "146, 84, 214"];
    return (v) => {
      if (!Number.isFinite(v)) return Number.isNaN(v) ? "" : "rgba(255, 0, 255, 0.8)";
      const strength = Math.min(Math.abs(v) / end, 1) * 0.75;
      return strength < 0.01 ? "" : `rgba(${v > 0 ? positive : negative}, ${strength.toFixed(3)})`;
    };
  };

  const fillBlock = (element, [start, end], texts, color, marked) => {
    const spans = document.createDocumentFragment();
    for (let i = start; i < end; i++) {
      const span = document.createElement("span");
      span.textContent = texts[i];
      span.dataset.i = i;
      span.style.backgroundColor = color(i);
      if (marked.has(i)) span.className = "hit";
      spans.append(span);
    }
    element.replaceChildren(spans);
  };

  /* Return the tokens in which each match of `query` begins, and all tokens that a match touches. */
  const find = (texts, query) => {
    const starts = [];
    const touched = new Set();
    if (!query) return { starts, touched };
    const offsets = [];
    let length = 0;
    for (const token of texts) {
      offsets.push(length);
      length += token.length;
    }
    const all = texts.join("").toLowerCase();
    const wanted = query.toLowerCase();
    let token = 0;
    for (let at = all.indexOf(wanted); at >= 0; at = all.indexOf(wanted, at + wanted.length)) {
      while (token + 1 < texts.length && offsets[token + 1] <= at) token += 1;
      starts.push(token);
      for (let i = token; i < texts.length && offsets[i] < at + wanted.length; i++) touched.add(i);
    }
    return { starts, touched };
  };

  const Numbers = ({ index, layout, columns, values, sample }) => {
    if (index === null) return html`<p class="muted">Point at a token, or focus the tokens and use the arrow keys.</p>`;
    return html`<dl class="facts"><div><dt>token</dt><dd><code>${layout.texts[index]}</code></dd></div>
      <div><dt>position</dt><dd>${number(index)}${index < sample.prompt_length ? " (prompt)" : ""}</dd></div>
      <div><dt>id</dt><dd>${layout.ids[index]}</dd></div>
      ${Object.keys(values).map((name) => html`<div key=${name} title=${text(columns[name]?.description)}><dt>${text(columns[name]?.title ?? name)}</dt><dd>${number(values[name][index])}</dd></div>`)}</dl>`;
  };

  HR.Tokens = ({ sample, columns, chosen }) => {
    const box = useRef();
    const [at, setAt] = useState(null);
    const [query, setQuery] = useState("");
    const layout = useMemo(() => layOut(sample), [sample]);
    const values = useMemo(() => Object.fromEntries(Object.entries(sample.values).map(([name, array]) => [name, HR.array(array)])), [sample]);
    const found = useMemo(() => find(layout.texts, query), [layout, query]);
    const drawn = useRef(); // the elements of the blocks, and which of them have coloured tokens
    const fill = useRef();

    useEffect(() => {
      const elements = layout.blocks.map(([start, end]) => {
        const element = document.createElement("div");
        element.className = "block";
        element.textContent = layout.texts.slice(start, end).join("");
        return element;
      });
      box.current.replaceChildren(...elements);
      drawn.current = { elements, near: new Set() };
      const observer = new IntersectionObserver(
        (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => reach(elements.indexOf(entry.target))),
        { rootMargin: "600px" },
      );
      elements.forEach((element) => observer.observe(element));
      return () => observer.disconnect();
    }, [layout]);
    useEffect(() => {
      const scale = colorScale(columns[chosen] ?? {}, values[chosen]);
      const color = (i) => (values[chosen] ? scale(values[chosen][i]) : "");
      fill.current = (n) => fillBlock(drawn.current.elements[n], layout.blocks[n], layout.texts, color, found.touched);
      drawn.current.near.forEach(fill.current);
    }, [layout, chosen, found]);

    const reach = (n) => {
      if (drawn.current.near.has(n)) return;
      drawn.current.near.add(n);
      fill.current(n);
    };
    const show = (i, scroll) => {
      box.current.querySelector(".at")?.classList.remove("at");
      const n = layout.blocks.findIndex(([start, end]) => i >= start && i < end);
      reach(n);
      const span = drawn.current.elements[n].children[i - layout.blocks[n][0]];
      span.classList.add("at");
      if (scroll) span.scrollIntoView({ block: "nearest" });
      setAt(i);
    };
    const point = (event) => event.target.dataset.i !== undefined && show(Number(event.target.dataset.i), false);
    const press = (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1, PageDown: 100, PageUp: -100 }[event.key];
      const target = { Home: 0, End: layout.texts.length - 1 }[event.key] ?? (move && Math.max(0, Math.min(layout.texts.length - 1, (at ?? -1) + move)));
      if (target === undefined) return;
      event.preventDefault();
      show(target, true);
    };
    const next = (direction) => {
      const { starts } = found;
      if (!starts.length) return;
      const after = direction > 0 ? starts.find((i) => i > (at ?? -1)) : starts.findLast((i) => i < (at ?? Infinity));
      show(after ?? (direction > 0 ? starts[0] : starts.at(-1)), true);
    };
    return html`<div class="tokens">
      <div class="bar"><label>find in tokens <input type="search" value=${query} onInput=${(e) => setQuery(e.target.value)} onKeyDown=${(e) => e.key === "Enter" && next(e.shiftKey ? -1 : 1)} /></label>
        ${query && html`<span role="status">${number(found.starts.length)} matches</span> <button onClick=${() => next(-1)}>previous</button><button onClick=${() => next(1)}>next</button>`}</div>
      <div class="columns">
        <div ref=${box} class="text token-text" tabindex="0" role="group" aria-label="tokens" onMouseOver=${point} onClick=${point} onKeyDown=${press}></div>
        <aside class="numbers" aria-live="polite"><${Numbers} index=${at !== null && at < layout.texts.length ? at : null} ...${{ layout, columns, values, sample }} /></aside>
      </div></div>`;
  };
})();
