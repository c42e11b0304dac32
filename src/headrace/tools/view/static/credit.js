"use strict";
/* The credit waterfall of a rollout: from the parts of its reward to its share of the step's gradient. */
(() => {
  const { html, text, number } = HR;
  const TITLES = { reward: "Reward", credit: "Credit", tokens: "Tokens", weight: "Weight in the loss", gradient: "Gradient" };

  /* Bars of one stage have one unit, hence one scale. A delta begins where the running sum stood. */
  const Stage = ({ stage, bars }) => {
    const ends = bars.flatMap((bar) => (bar.kind === "delta" ? [bar.total - bar.value, bar.total] : [0, bar.value])).filter(Number.isFinite);
    const [low, high] = [Math.min(0, ...ends), Math.max(0, ...ends)];
    const x = (value) => ((value - low) / (high - low || 1)) * 200;
    const rect = (bar) => {
      const [from, to] = bar.kind === "delta" ? [bar.total - bar.value, bar.total] : [0, bar.value];
      if (!Number.isFinite(from) || !Number.isFinite(to)) return "";
      return html`<rect class=${bar.kind === "total" ? "total" : bar.value < 0 ? "minus" : "plus"} x=${x(Math.min(from, to))} y="2" width=${Math.max(Math.abs(x(to) - x(from)), 1)} height="12" />`;
    };
    return html`<tbody><tr><th colspan="6" scope="rowgroup">${text(TITLES[stage] ?? stage)}</th></tr>
      ${bars.map((bar, i) => html`<tr key=${i} class=${bar.kind === "total" ? "total" : ""}><td>${text(bar.name)}</td>
        <td><svg class="waterfall" viewBox="0 0 200 16" preserveAspectRatio="none" aria-hidden="true"><line x1=${x(0)} x2=${x(0)} y1="0" y2="16" />${rect(bar)}</svg></td>
        <td class="right">${bar.kind === "delta" && bar.value > 0 ? "+" : ""}${number(bar.value)}</td><td class="right">${number(bar.total)}</td>
        <td><code>${text(bar.formula)}</code></td><td><code>${text(bar.key)}</code></td></tr>`)}</tbody>`;
  };

  HR.Credit = ({ id, step, row }) => {
    const state = HR.useData(`/api/runs/${id}/steps/${step}/rollouts/${row}/credit`);
    return html`<${HR.Loaded} state=${state}>${(credit) => html`
      <p>Algorithm <b>${text(credit.algorithm)}</b>, group of ${number(credit.group_size)}.${!credit.exact && " The terms are estimates: see the notes."}</p>
      <div class="scroll" tabindex="0" role="region" aria-label="credit waterfall"><table class="credit">
        <thead><tr><th>term</th><th>bar</th><th class="right">value</th><th class="right">sum</th><th>formula</th><th>config key</th></tr></thead>
        ${[...new Set(credit.bars.map((bar) => bar.stage))].map((stage) => html`<${Stage} key=${stage} stage=${stage} bars=${credit.bars.filter((bar) => bar.stage === stage)} />`)}</table></div>
      ${credit.streams.length > 0 && html`<h3>Streams of its tokens</h3><${HR.Table} label="streams" rows=${credit.streams} columns=${["name", "min", "mean", "max"].map((key) => ({ key, title: key }))} />`}
      ${credit.components.length > 0 && html`<h3>Components of the loss</h3><${HR.Table} label="components" rows=${credit.components} columns=${[
        { key: "name", title: "component" }, { key: "members", title: "tokens" }, { key: "weight", title: "sum of weights" }, { key: "divisor", title: "tokens of the step" }, { key: "share", title: "share" },
      ]} />`}
      <p>Share of the step's gradient: ${credit.share.recorded === null ? "not recorded" : `${number(credit.share.recorded * 100)}%`}${credit.share.estimate !== null && `, estimate from the rollouts ${number(credit.share.estimate * 100)}%`}</p>
      ${credit.notes.map((note, i) => html`<p key=${i} class="muted">${text(note)}</p>`)}`}<//>`;
  };
})();
