"use strict";
/* One rollout of training or of an evaluation: conversation, rewards by part, tokens, credit. */
(() => {
  const { html, text, number, seconds, useState } = HR;
  const COLUMN_ORDER = ["advantages", "ratio", "entropy", "versions", "mask", "share", "share_estimate", "logprobs"];

  const partText = (part) => (typeof part === "string" ? part : typeof part?.text === "string" ? part.text : JSON.stringify(part));
  const contentText = (content) => (Array.isArray(content) ? content.map(partText).join("\n") : content === null || content === undefined ? "" : partText(content));
  const ROLES = ["system", "user", "assistant", "tool"];

  const ToolCall = ({ call }) => {
    const { name, arguments: given } = call.function ?? call;
    return html`<div class="tool-call"><b>calls ${text(name)}</b> <${HR.LongText} value=${typeof given === "string" ? given : JSON.stringify(given)} /></div>`;
  };

  HR.Messages = ({ messages, maths = false }) =>
    messages.map(
      (message, i) => html`<article key=${i} class=${`message ${ROLES.includes(message.role) ? message.role : ""}`}>
        <h4>${text(message.role)}${message.name && ` · ${text(message.name)}`}</h4>
        ${message.reasoning_content && html`<details><summary>reasoning</summary><${HR.LongText} value=${contentText(message.reasoning_content)} /></details>`}
        <${maths ? HR.MathText : HR.LongText} value=${contentText(message.content)} />
        ${(message.tool_calls ?? []).map((call, n) => html`<${ToolCall} key=${n} call=${call} />`)}</article>`,
    );

  const TokenSection = ({ rollout }) => {
    const names = [...new Set([...COLUMN_ORDER, ...Object.keys(rollout.columns)])].filter((name) => rollout.columns[name]);
    const [chosen, setChosen] = useState(names[0]);
    const [number_, setNumber] = useState(0);
    const sample = rollout.samples[number_];
    if (!sample) return html`<p class="muted">No tokens: the rollout has no samples.</p>`;
    const column = rollout.columns[chosen];
    return html`<div class="bar">
        ${rollout.samples.length > 1 && html`<${HR.Select} label="sample" value=${number_} onChange=${(v) => setNumber(Number(v))} options=${rollout.samples.map((s, i) => [i, `${i}: ${s.length} tokens`])} />`}
        <${HR.Select} label="colour by" value=${chosen} onChange=${setChosen} options=${names.map((name) => [name, rollout.columns[name].title ?? name])} />
        <span class="muted">${text(column?.description)}${column?.source === "estimate" ? " (estimate)" : ""}</span></div>
      <${HR.Tokens} sample=${sample} columns=${rollout.columns} chosen=${chosen} />`;
  };

  const Numbers = ({ title, numbers }) =>
    Object.keys(numbers).length > 0 &&
    html`<h3>${title}</h3><${HR.Facts} facts=${Object.entries(numbers).map(([name, value]) => [name, number(value)])} />`;

  HR.pages.rollout = ({ run, id, step, row, evaluation }) => {
    const base = evaluation ? `/api/runs/${id}/evaluation/${step}/rollouts/${row}` : `/api/runs/${id}/steps/${step}/rollouts/${row}`;
    const state = HR.useData(base);
    const [maths, setMaths] = useState(false);
    const siblings = HR.useData(evaluation ? null : `/api/runs/${id}/steps/${step}`).data?.groups.find((g) => g.rows.includes(row))?.rows ?? [];
    const at = siblings.indexOf(row);
    const move = (by) => siblings[at + by] !== undefined && HR.go(HR.runLink(id, "step", step, "rollout", siblings[at + by]));
    HR.useKeys({ "[": () => move(-1), "]": () => move(1) });
    return html`<${HR.Loaded} state=${state}>${(rollout) => html`
      ${!evaluation && html`<div class="bar"><button disabled=${at <= 0} onClick=${() => move(-1)}>better rollout [</button><button disabled=${at < 0 || at + 1 >= siblings.length} onClick=${() => move(1)}>worse rollout ]</button>
        ${rollout.group !== null && html`<a href=${HR.runLink(id, "step", step, "group", rollout.group)}>the whole group</a>`}
        ${run.journal && html`<a href=${HR.runLink(id, "draw", rollout.draw)}>draw ${rollout.draw}</a>`}</div>`}
      <${HR.Facts} facts=${[
        ["environment", text(rollout.env)], ["task", text(rollout.task_key)], ["reward", number(rollout.reward)], ["advantage", number(rollout.advantage)],
        ["outcome", text(rollout.drop_reason || rollout.error_reason || "kept")], ["stop reason", text(rollout.stop_reason)], ["truncated", rollout.truncated ? "yes" : "no"],
        ["time", seconds(rollout.seconds)], ["agent", text(rollout.agent)],
      ]} />
      ${rollout.error && html`<div class="error"><${HR.LongText} value=${rollout.error} /></div>`}
      ${rollout.notes.map((note, i) => html`<p key=${i} class="muted">${text(note)}</p>`)}
      <${Numbers} title="Rewards by part" numbers=${rollout.rewards} /><${Numbers} title="Metrics" numbers=${rollout.metrics} />
      <h2>Conversation</h2><div class="bar"><label><input type="checkbox" checked=${maths} onChange=${(e) => setMaths(e.target.checked)} /> rendered maths</label></div>
      <${HR.Messages} messages=${rollout.messages} maths=${maths} />
      <h2>Tokens</h2><${TokenSection} key=${base} rollout=${rollout} />
      ${!evaluation && html`<h2>Credit</h2><${HR.Credit} id=${id} step=${step} row=${row} />`}`}<//>`;
  };
})();
