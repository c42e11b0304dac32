"use strict";
/* Formulas in a text as MathML, by Temml, which is loaded when they are first asked for.

The text is hostile: a formula becomes MathML elements only, without links or scripts, and stays text otherwise. */
(() => {
  const { html, text, useEffect, useRef, useState } = HR;
  const FORMULA = /\$\$([^]{1,2000}?)\$\$|\\\[([^]{1,2000}?)\\\]|\\\(([^]{1,2000}?)\\\)|\$(?![\s\d])([^$\n]{1,300}?)\$/g;
  const MAX_CHARACTERS = 100_000; // of a text; the search for ends of formulas takes time
  const MAX_FORMULAS = 500;
  const MATHML = "http://www.w3.org/1998/Math/MathML";
  const isHarmless = (element) => element.namespaceURI === MATHML && ![...element.attributes].some(({ name }) => /^on|href|src/i.test(name));

  let loading = null;
  const load = () =>
    (loading ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = "static/vendor/temml.min.js";
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${script.src}: the file is missing. Install headrace again.`));
      document.head.append(script);
    }));

  const formula = (source, displayMode) => {
    const place = document.createElement("span");
    try {
      temml.render(source, place, { displayMode, trust: false, throwOnError: true, maxExpand: 100, maxSize: [20, 20] });
    } catch (error) {
      if (!(error instanceof temml.ParseError)) throw error;
      return null; // not a formula, but a text with its signs
    }
    return [...place.querySelectorAll("*")].every(isHarmless) ? place : null;
  };

  const parts = (shown) => {
    const found = [];
    let end = 0;
    for (const match of shown.length > MAX_CHARACTERS ? [] : shown.matchAll(FORMULA)) {
      if (found.length >= 2 * MAX_FORMULAS) break;
      const node = formula(match.slice(1).find((group) => group !== undefined), match[1] !== undefined || match[2] !== undefined);
      if (!node) continue;
      found.push(document.createTextNode(shown.slice(end, match.index)), node);
      end = match.index + match[0].length;
    }
    return [...found, document.createTextNode(shown.slice(end))];
  };

  HR.MathText = ({ value }) => {
    const place = useRef();
    const [error, setError] = useState(null);
    useEffect(() => {
      load().then(() => place.current?.replaceChildren(...parts(text(value))), setError);
    }, [value]);
    return html`${error && html`<p class="error">${text(error.message)}</p>`}<div class="text" ref=${place}>${text(value)}</div>`;
  };
})();
