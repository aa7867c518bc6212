// Rollouts: one row each, as a query finds them, sorted by any column.
import { useCallback, useEffect, useState } from "./vendor/hooks.js";
import { html, pure } from "./html.js";
import { change, link } from "./address.js";
import { Instead } from "./answer.js";
import { amount, number, plural, seconds, signed, visible } from "./format.js";
import { announce, useKeys } from "./keys.js";
import { QueryBar, useQueryWords } from "./query.js";
import { Recycled } from "./recycled.js";
import { Outcome, Reward, spanOf } from "./reward.js";
import { useRows } from "./rows.js";
import { ExportMenu } from "./save.js";
import { useNarrow } from "./screen.js";

const COLUMNS = [["task", "Task"], ["source", "Source"], ["outcome", "Outcome"], ["reward", "Reward"], ["advantage", "Adv."], ["turns", "Turns"], ["tokens", "Tokens"], ["seconds", "Took"], ["retries", "Retries"], ["answer", "Answer or failure"]];

const Row = pure(({ row, index, where, active, span, metric }) => {
  if (!row) return html`<div class="rollout-row waits" role="row" aria-rowindex=${index + 2}></div>`;
  const cell = (name, content, classes = "") => html`<div class=${`c-${name} ${classes}`} role="gridcell">${content}</div>`;
  return html`<a class=${`rollout-row${active ? " active" : ""}`} role="row" id=${`rollout-${index}`} tabindex="-1" aria-rowindex=${index + 2} href=${where(row.at, index)}>
    ${cell("task", html`${row.task < 0 ? row.uid.slice(0, 6) : row.task}<small>/${row.rollout}</small>`)}
    ${cell("source", row.source)}
    ${cell("outcome", html`<${Outcome} name=${row.outcome} />`)}
    ${cell("reward", html`<${Reward} value=${row.reward} span=${span} outcome=${row.outcome} />`)}
    ${cell("advantage", signed(row.advantage, 2), "figure")}
    ${cell("turns", row.turns, "figure")}${cell("tokens", amount(row.tokens), "figure")}${cell("seconds", seconds(row.seconds), "figure")}
    ${cell("retries", metric ? number(row.metrics?.[metric]) : row.retries || "", "figure")}
    ${cell("answer", html`${row.mark && html`<span class="badge">${row.mark}</span> `}<span dir="auto" class=${row.failure ? "bad" : ""}>${visible(row.failure || row.answer || "")}</span>`)}
  </a>`;
});

export function Rollouts({ run, info, params, version }) {
  const query = params.q || "";
  const sort = params.sort || "";
  const descending = Boolean(params.down);
  const rows = useRows("rollouts", { run, query, sort, descending }, version);
  const words = useQueryWords(run, info);
  const narrow = useNarrow();
  const [active, setActive] = useState(params.nth == null ? -1 : Number(params.nth));
  const where = useCallback((at, nth) => link(["run", run, "at", at], { q: query, sort: params.sort, down: params.down, md: params.md, nth }), [run, query, params.sort, params.down, params.md]);
  const metric = words.metrics.includes(sort) ? sort : null;
  const span = spanOf(info);
  const total = rows.total ?? 0;
  const found = rows.total != null;
  useEffect(() => {
    if (found && params.nth != null && document.activeElement === document.body) document.getElementById("rollouts")?.focus({ preventScroll: true });
  }, [found]);
  const pressed = (event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: 20, PageUp: -20, Home: -1e9, End: 1e9 };
    if (event.target !== event.currentTarget || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      const next = Math.min(total - 1, Math.max(0, active + moves[event.key]));
      setActive(next);
      const row = rows.at(next);
      if (row) announce(`task ${row.task}, rollout ${row.rollout}, ${row.outcome}, reward ${number(row.reward)}`);
    } else if (event.key === "Enter" && rows.at(active)) location.hash = where(rows.at(active).at, active);
    else return;
    event.preventDefault();
  };
  useKeys({ ArrowDown: [null, () => document.getElementById("rollouts")?.focus()] });
  const press = (name) => change({ sort: name, down: name === sort ? !descending : ["reward", "advantage", "seconds", "tokens", "retries", "turns"].includes(name) });
  const columns = metric ? COLUMNS.map(([name, says]) => (name === "retries" ? [metric, metric] : [name, says])) : COLUMNS;
  return html`<section class="fill" aria-labelledby="title">
    <${QueryBar} query=${query} words=${words} error=${rows.total == null ? null : rows.error}><${ExportMenu} run=${run} query=${query} /></${QueryBar}>
    <div class="under"><span>${rows.total == null ? "…" : plural(total, "rollout")}</span>
      ${words.metrics.length > 0 && html`<label class="pick">Sort by metric <select value=${metric || ""} onChange=${(event) => change({ sort: event.target.value || null, down: true })}><option value="">–</option>${words.metrics.map((name) => html`<option>${name}</option>`)}</select></label>`}</div>
    ${rows.total == null ? html`<${Instead} error=${rows.error} />` : html`<div class="table" id="rollouts" role="grid" tabindex="0" aria-label="Rollouts: arrows move, Enter opens" aria-rowcount=${total + 1}
      aria-activedescendant=${active >= 0 ? `rollout-${active}` : null} onKeyDown=${pressed} onFocus=${(event) => event.target === event.currentTarget && active < 0 && total && setActive(0)}>
      <div class="heads rollout-row" role="row" aria-rowindex="1">${columns.map(([name, says], at) => html`<div role="columnheader" class=${`c-${COLUMNS[at][0]}`} aria-sort=${name === sort ? (descending ? "descending" : "ascending") : "none"}><button onClick=${() => press(name)}>${says}${name === sort ? (descending ? " ↓" : " ↑") : ""}</button></div>`)}</div>
      <${Recycled} name=${`rollouts ${run} ${query} ${sort} ${descending}`} count=${total} height=${narrow ? 58 : 30} active=${active} onRange=${rows.want} role="rowgroup"
        row=${(at) => html`<${Row} row=${rows.at(at)} index=${at} where=${where} active=${at === active} span=${span} metric=${metric} />`} />
      ${total === 0 && html`<p class="none">No rollout fits. <button class="quiet" onClick=${() => change({ q: null })}>Clear the query</button></p>`}
    </div>`}
  </section>`;
}
