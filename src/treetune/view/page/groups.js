// Groups: one row per task, with its rollouts as coloured cells. Sorted by variance at first, because a policy learns
// from rollouts that differ. Arrow keys move through the cells, Enter opens one.
import { useCallback, useEffect, useState } from "./vendor/hooks.js";
import { html, pure } from "./html.js";
import { change, link } from "./address.js";
import { Instead, isPart } from "./answer.js";
import { number, plural, visible } from "./format.js";
import { announce, useKeys } from "./keys.js";
import { QueryBar, useQueryWords } from "./query.js";
import { Recycled, toTop } from "./recycled.js";
import { cellClass, cellText, cellTitle, Flag, Legend, spanOf } from "./reward.js";
import { useRows } from "./rows.js";
import { ExportMenu } from "./save.js";
import { useNarrow } from "./screen.js";

const COLUMNS = [
  ["task", "Task", "ascending"], ["source", "Source", "ascending"], [null, "Question"], ["rollouts", "Rollouts"],
  ["mean", "Mean", "descending"], ["variance", "Variance", "descending"], ["failed", "Flag", "descending"],
];

export function orderOf(params) {
  const sort = params.sort || "variance";
  return { sort, descending: params.up ? false : !["task", "source"].includes(sort) || Boolean(params.down) };
}

function Heads({ sort, descending }) {
  const press = (name, first) => {
    const turned = name === sort ? !descending : first !== "ascending";
    const usual = !["task", "source"].includes(name);
    change({ sort: name, up: usual && !turned, down: !usual && turned, row: null });
  };
  return html`<div class="heads group-row" role="row" aria-rowindex="1">
    ${COLUMNS.map(([name, says, first]) => html`<div role="columnheader" class=${`h-${says.toLowerCase()}`}
      aria-sort=${name === sort ? (descending ? "descending" : "ascending") : name ? "none" : null}>
      ${name ? html`<button onClick=${() => press(name, first)}>${says}${name === sort ? (descending ? " ↓" : " ↑") : ""}</button>` : says}
    </div>`)}
  </div>`;
}

const MANY = 16;

// The range of advantages: as far as a reward can be from the mean, on both sides.
function aside([low, high]) {
  return [low - high, high - low];
}

// The number of cells per row: enough for most groups.
function widthOf(info) {
  const most = Math.ceil((info?.rollouts || 8) / (info?.tasks || 1));
  return `${Math.min(480, Math.max(110, 30 * most))}px`;
}

const Row = pure(({ row, index, column, span, by, where }) => {
  if (!row) return html`<div class="group-row waits" role="row" aria-rowindex=${index + 2}></div>`;
  const scale = by === "advantage" ? aside(span) : span;
  return html`<div class=${`group-row${column >= 0 ? " active" : ""}`} role="row" aria-rowindex=${index + 2}>
    <div class="task" role="rowheader">${row.task < 0 ? row.uid.slice(0, 6) : row.task}${row.occurrence ? html`<sup title="equal tasks: which of them">${row.occurrence}</sup>` : ""}</div>
    <div class="source" role="gridcell" title=${row.source}>${row.source}</div>
    <div class="question" role="gridcell" dir="auto">${visible(row.question || "")}</div>
    <div class=${`cells${row.cells.length > MANY ? " many" : ""}`} role="presentation">
      ${row.cells.map((cell, at) => {
        const value = by === "advantage" ? cell.advantage : cell.reward;
        return html`<a id=${`cell-${index}-${at}`} role="gridcell" tabindex="-1" href=${where(cell.at, index)} title=${cellTitle(cell)}
          aria-label=${cellTitle(cell)} class=${`${cellClass(cell, scale, value)}${at === column ? " on" : ""}${cell.fits ? "" : " faint"}${cell.tag ? " tagged" : ""}`}
          >${cellText(cell, value)}</a>`;
      })}
    </div>
    <div class="figure mean" role="gridcell">${number(row.mean)}</div>
    <div class="figure variance" role="gridcell">${number(row.variance)}</div>
    <div class="flags" role="gridcell"><${Flag} name=${row.flag} /></div>
  </div>`;
});

export function Groups({ run, info, params, version }) {
  const query = params.q || "";
  const { sort, descending } = orderOf(params);
  const by = params.by || "reward";
  const rows = useRows("groups", { run, query, sort, descending }, version);
  const words = useQueryWords(run, info);
  const narrow = useNarrow();
  const [active, setActive] = useState(() => ({ row: params.row == null ? -1 : Number(params.row), column: Number(params.column) || 0 }));
  const list = `groups ${run} ${query} ${sort} ${descending}`;
  const span = spanOf(info);
  const where = useCallback((at, row) => link(["run", run, "at", at], { q: query, sort: params.sort, up: params.up, down: params.down, by: params.by, md: params.md, row }),
    [run, query, params.sort, params.up, params.down, params.by, params.md]);
  useEffect(() => {
    if (params.row == null) setActive({ row: -1, column: 0 });
  }, [query, sort, descending]);
  useEffect(() => {
    if (rows.total != null && !rows.stale) announce(`${plural(rows.total, "group")}`);
  }, [rows.total, rows.stale]);

  const found = rows.total != null;
  useEffect(() => {
    // After returning from a rollout: the previous position.
    if (found && params.row != null && document.activeElement === document.body) document.getElementById("groups")?.focus({ preventScroll: true });
  }, [found]);

  const move = (down, across) => {
    const row = Math.min(rows.total - 1, Math.max(0, active.row + down));
    const cells = rows.at(row)?.cells || [];
    const column = Math.min(Math.max(0, cells.length - 1), Math.max(0, active.column + across));
    setActive({ row, column });
    const group = rows.at(row);
    if (group) announce(`task ${group.task}, mean ${number(group.mean)}, ${cells[column] ? cellTitle(cells[column]) : ""}`);
  };
  const enter = () => document.getElementById("groups")?.focus();
  useKeys({ ArrowDown: [null, enter], ArrowRight: [null, enter], Enter: [null, enter] });
  const pressed = (event) => {
    const page = Math.max(1, Math.floor(event.currentTarget.clientHeight / 32) - 2);
    const moves = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1], PageDown: [page, 0], PageUp: [-page, 0],
      Home: [-1e9, 0], End: [1e9, 0], j: [1, 0], k: [-1, 0] };
    const cell = rows.at(active.row)?.cells[active.column];
    if (event.target !== event.currentTarget || event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) move(...moves[event.key]);
    else if (event.key === "Enter" && cell) {
      change({ row: active.row, column: active.column });
      location.hash = where(cell.at, active.row);
    } else return;
    event.preventDefault();
  };
  const clicked = (event) => {
    const place = /^cell-(\d+)-(\d+)$/.exec(event.target.closest?.("a.cell")?.id || "");
    if (place) change({ row: place[1], column: place[2] });
  };
  const total = rows.total ?? 0;
  return html`<section class="fill" aria-labelledby="title">
    <${QueryBar} query=${query} words=${words} error=${rows.total == null ? null : rows.error}>
      <label class="pick">Cells <select value=${by} onChange=${(event) => change({ by: event.target.value === "reward" ? null : event.target.value })}>
        <option value="reward">reward</option><option value="advantage">advantage</option></select></label>
      <${ExportMenu} run=${run} query=${query} />
    </${QueryBar}>
    <div class="under">
      <span>${rows.total == null ? "…" : plural(total, "group")}${isPart(rows.rest) ? ` (${Math.floor(100 * rows.rest.read)} % of the run read)` : ""}${query && rows.rest.matching_rollouts != null ? html` · ${plural(rows.rest.matching_rollouts, "rollout")} fit` : ""}</span>
      <${Legend} span=${by === "advantage" ? aside(span) : span} of=${by} />
    </div>
    ${rows.total == null ? html`<${Instead} error=${rows.error} />` : html`<div class="table" id="groups" style=${{ "--wide": widthOf(info) }} role="grid" tabindex="0" aria-label="Groups: arrows move, Enter opens" aria-rowcount=${total + 1}
      aria-activedescendant=${active.row >= 0 ? `cell-${active.row}-${active.column}` : null} onKeyDown=${pressed} onClick=${clicked}
      onFocus=${(event) => event.target === event.currentTarget && active.row < 0 && total && setActive({ row: 0, column: 0 })}>
      <${Heads} sort=${sort} descending=${descending} />
      <${Recycled} name=${list} count=${total} height=${narrow ? 74 : 32} active=${active.row} onRange=${rows.want} role="rowgroup"
        row=${(at) => html`<${Row} row=${rows.at(at)} index=${at} column=${at === active.row ? active.column : -1} span=${span} by=${by} where=${where} />`} />
      ${total === 0 && html`<p class="none">No group fits. <button class="quiet" onClick=${() => { toTop(list); change({ q: null }); }}>Clear the query</button></p>`}
    </div>`}
  </section>`;
}
