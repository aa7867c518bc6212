// Rollout: one conversation with all facts about it, next to the other rollouts of its group.
// ← → go through the group, ↑ ↓ with Shift (or k, j) to the task before and after.
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { change, go, link } from "./address.js";
import { AgentCalls, lanesOf } from "./agent.js";
import { AGAIN, Instead, forget, useAnswer } from "./answer.js";
import { ask } from "./api.js";
import { Chat } from "./chat.js";
import { Facts } from "./facts.js";
import { useRun } from "./follow.js";
import { number, signed, visible } from "./format.js";
import { orderOf } from "./groups.js";
import { announce, useKeys } from "./keys.js";
import { Text } from "./message.js";
import { cellClass, cellText, cellTitle, Outcome, Reward, spanOf } from "./reward.js";
import { copy } from "./screen.js";
import { Tokens } from "./tokens.js";

function GroupCells({ run, group, at, span, params, tab }) {
  return html`<nav class="cells strip" aria-label="Rollouts of this task">${group.map((cell) => html`<a href=${link(["run", run, "at", cell.at, ...tab], params)} key=${cell.at}
    class=${`${cellClass(cell, span)}${cell.at === at ? " on" : ""}`} title=${cellTitle(cell)} aria-label=${cellTitle(cell)} aria-current=${cell.at === at ? "page" : null}>${cellText(cell)}</a>`)}</nav>`;
}

function Rendered({ rendered, why, markdown }) {
  if (!rendered) return why ? html`<p class="absent">The environment's own drawing is not shown: ${visible(why)}</p>` : null;
  const short = rendered.text.split("\n").length <= 24;
  return html`<details class="card rendered" open=${short}><summary>As the environment shows it</summary><${Text} text=${rendered.text} markdown=${markdown || rendered.kind === "markdown"} data=${rendered.kind !== "markdown"} /></details>`;
}

// The previous or next entry in the order of the list: the next group (`row`), or the next rollout (`nth`).
async function neighbour(run, params, by, column) {
  const list = params.nth == null ? "groups" : "rollouts";
  const start = Number(params.nth ?? params.row) + by;
  if (!(start >= 0)) return null;
  const order = list === "groups" ? orderOf(params) : { sort: params.sort || "", descending: Boolean(params.down) };
  const { rows } = await ask(list, { run, query: params.q || "", ...order, start, count: 1 });
  if (!rows.length) return null;
  const { cells } = rows[0];
  return cells ? { row: start, at: nearest(cells, column).at } : { nth: start, at: rows[0].at };
}

// Among the rollouts of a group that match the query, the one nearest to the current column; among all, if none matches.
function nearest(cells, column) {
  const far = (cell) => Math.abs(cells.indexOf(cell) - column);
  const fitting = cells.filter((cell) => cell.fits);
  return (fitting.length ? fitting : cells).reduce((best, cell) => (far(cell) < far(best) ? cell : best));
}

export function Rollout({ run, at, tab, info, params, version }) {
  const name = /^\d+$/.test(at) ? { at: Number(at) } : { name: at };
  const [marked, setMarked] = useState(0);
  const { data, error } = useAnswer("rollout", { run, ...name }, `${version} ${marked}`);
  // The run has it, but the server has not read that far yet.
  const known = useRun(run)?.rollouts;
  const unread = !data && known > Number(at) && /no rollout/.test(error?.message);
  useEffect(() => {
    const timer = unread ? setTimeout(() => setMarked((times) => times + 1), AGAIN) : 0;
    return () => clearTimeout(timer);
  }, [error]);
  const markdown = params.md !== "0" && Boolean(params.md);
  const tokens = tab === "tokens";
  const tail = tokens ? ["tokens"] : [];
  const group = data?.group || [];
  const column = Math.max(0, group.findIndex((cell) => cell.at === data?.at));
  const across = (by) => {
    const next = group[column + by];
    if (next) go(["run", run, "at", next.at, ...tail], params, true);
  };
  const down = async (by) => {
    const before = location.hash;
    const next = await neighbour(run, params, by, column);
    if (location.hash !== before) return; // one has gone elsewhere meanwhile
    if (next) go(["run", run, "at", next.at, ...tail], { ...params, row: next.row, nth: next.nth }, true);
    else announce("There is no other rollout");
  };
  const turn = (by) => {
    const turns = [...document.querySelectorAll(".turn")];
    const box = document.getElementById("main");
    const edge = box.getBoundingClientRect().top + 60;
    const now = turns.filter((each) => each.getBoundingClientRect().top < edge + 4).length - 1;
    turns[Math.min(turns.length - 1, Math.max(0, now + by))]?.scrollIntoView({ block: "start" });
  };
  const up = () => {
    const kept = { ...params, way: null };
    if (params.nth != null) go(["run", run, "rollouts"], kept);
    else if (params.rule != null) go(["run", run, "suspicious"], params.rule === "all" ? {} : kept);
    else go(["run", run, "groups"], { ...kept, column: params.row == null ? null : column });
  };
  useKeys({
    ArrowLeft: ["the rollout before", () => across(-1)], ArrowRight: ["the rollout after", () => across(1)],
    k: ["the previous one in the list", () => down(-1)], j: ["the next one in the list", () => down(1)],
    p: ["the turn before", () => turn(-1)], n: ["the turn after", () => turn(1)],
    t: ["tokens, or the conversation", () => go(["run", run, "at", at, ...(tokens ? [] : ["tokens"])], params, true)],
    m: ["markdown and formulas", () => change({ md: markdown ? null : "1" })],
    y: ["copy the command that plays it again", () => data && copy(data.again)],
    Escape: ["back to the list", up],
  });
  useEffect(() => {
    if (data) announce(`task ${data.entry.task}, rollout ${data.entry.rollout}, ${data.entry.outcome}, reward ${number(data.entry.reward)}`);
    document.getElementById("main")?.scrollTo(0, 0);
  }, [data?.at]);
  if (!data) return html`<${Instead} error=${unread ? null : error} />`;
  const { entry, trace } = data;
  const span = spanOf(info);
  const inList = params.row != null || params.nth != null;
  return html`<section class="page rollout" aria-labelledby="title">
    <header class="rollout-head">
      <div class="line"><h1 id="title" tabindex="-1">Task ${entry.task < 0 ? entry.uid.slice(0, 8) : entry.task} <small>rollout ${entry.rollout}</small></h1>
        <${Reward} value=${entry.reward} span=${span} /><${Outcome} name=${entry.outcome} />
        ${entry.advantage != null && html`<span class="badge" title="the reward minus the mean of the group">advantage ${signed(entry.advantage)}</span>`}
        <span class="soft">${visible(entry.source || "")}</span></div>
      <div class="line">
        ${inList && html`<button class="icon" aria-label="The previous one in the list" title="Before (k)" onClick=${() => down(-1)}>↑</button><button class="icon" aria-label="The next one in the list" title="After (j)" onClick=${() => down(1)}>↓</button>`}
        <${GroupCells} run=${run} group=${group} at=${data.at} span=${span} params=${params} tab=${tail} />
        <span class="gap"></span>
        <div class="choices" role="group" aria-label="View">
          <a class="chip" aria-current=${tokens ? null : "page"} href=${link(["run", run, "at", at], params)}>Conversation</a>
          <a class=${`chip${data.has_tokens ? "" : " off"}`} aria-current=${tokens ? "page" : null} href=${link(["run", run, "at", at, "tokens"], params)} title=${data.has_tokens ? "" : "The trace has no tokens"}>Tokens</a>
          <button class="chip" aria-pressed=${markdown} onClick=${() => change({ md: markdown ? null : "1" })}>Markdown</button></div>
      </div>
    </header>
    <div class="columns">
      <div class="conversation">${tokens ? html`<${Tokens} run=${run} at=${data.at} has=${data.has_tokens} lanes=${trace.agent ? lanesOf(trace.agent, data.conversations) : null} version=${version} />` : html`<${Rendered} rendered=${data.rendered} why=${data.not_rendered} markdown=${markdown} />${trace.agent && html`<${AgentCalls} key=${data.at} agent=${trace.agent} names=${data.conversations} markdown=${markdown} /><h2>What the agent handed in</h2>`}<${Chat} key=${data.at} trace=${trace} advantages=${data.advantages} markdown=${markdown} span=${span} />`}</div>
      <${Facts} run=${run} answer=${data} onMark=${() => { forget(); setMarked(marked + 1); }} />
    </div>
  </section>`;
}
