// Compare: two or more runs, paired by task: what is better, what is worse, and whether chance explains it.
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { change, link } from "./address.js";
import { Instead, useAnswer } from "./answer.js";
import { Interval } from "./chart.js";
import { useRuns } from "./follow.js";
import { count, number, percent, plural, signed } from "./format.js";
import { announce } from "./keys.js";
import { Pair } from "./pair.js";
import { Recycled } from "./recycled.js";
import { step } from "./reward.js";
import { useNarrow } from "./screen.js";

const KINDS = ["fixed", "broken", "unchanged"];

function reach(differences) {
  const far = Math.max(0.05, ...differences.map((each) => Math.abs(each.difference) + 1.96 * (each.stderr || 0)));
  return [-far, far];
}

function Differences({ comparison }) {
  const rows = [["Scored rollouts", comparison.scored], ["All, with failed rollouts as 0", comparison.over_all], ...Object.entries(comparison.sources || {})].filter(([, each]) => each);
  const [low, high] = reach(rows.map(([, each]) => each));
  return html`<div class="scrolls"><table><thead><tr><th scope="col">Over</th><th class="right" scope="col">Tasks</th><th class="right" scope="col">Before</th><th class="right" scope="col">After</th><th class="right" scope="col">Difference</th><th scope="col"><span class="hidden-text">With its error</span></th><th class="right" scope="col">p</th><th scope="col">To settle it</th></tr></thead>
    <tbody>${rows.map(([name, each]) => html`<tr><th scope="row">${name}</th><td class="right">${count(each.tasks)}</td><td class="right">${number(each.before)}</td><td class="right">${number(each.after)}</td>
      <td class="right strong">${signed(each.difference)} <small title="standard error">± ${number(each.stderr)}</small></td>
      <td><${Interval} value=${each.difference} error=${each.stderr} low=${low} high=${high} zero=${0} /></td>
      <td class="right" title=${`chance turns the ${each.by}`}>${each.p_value < 0.001 ? "< 0.001" : number(each.p_value)}</td>
      <td>${each.tasks_to_settle ? `about ${plural(each.tasks_to_settle, "task")}` : each.p_value < 0.05 ? "settled" : "–"}</td></tr>`)}</tbody></table></div>`;
}

function Tasks({ compared, runs, names, kind, onOpen, open }) {
  const tasks = compared.tasks.filter((task) => task.kind === kind);
  const narrow = useNarrow();
  const at = tasks.findIndex((task) => `${task.uid}/${task.occurrence}` === open);
  const pressed = (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!by || !tasks.length) return;
    event.preventDefault();
    const next = tasks[Math.min(tasks.length - 1, Math.max(0, at + by))];
    onOpen(`${next.uid}/${next.occurrence}`);
    announce(`task ${next.task}: solved ${percent(next.solved_before)} before, ${percent(next.solved_after)} after`);
  };
  return html`<div class="tasks">
    <div class="choices" role="group" aria-label="Which tasks">${KINDS.map((name) => html`<button class=${`chip ${name}`} aria-pressed=${name === kind} onClick=${() => change({ kind: name, task: null })}>${count(compared.tasks.filter((task) => task.kind === name).length)} ${name}</button>`)}</div>
    <${Recycled} name=${`compare ${runs.join(",")} ${kind}`} count=${tasks.length} height=${narrow ? 44 : 32} active=${at} tabindex="0" role="listbox" aria-label=${`Tasks ${kind}: arrows move`} onKeyDown=${pressed} aria-activedescendant=${at >= 0 ? `task-${at}` : null}
      row=${(index) => {
        const task = tasks[index];
        return html`<button id=${`task-${index}`} class=${`change-row${index === at ? " active" : ""}`} role="option" aria-selected=${index === at} tabindex="-1" onClick=${() => onOpen(`${task.uid}/${task.occurrence}`)}>
          <span class="c-task">${task.task < 0 ? task.uid.slice(0, 6) : task.task}</span><span class="source">${task.source}</span>
          <span class="ends" title="share of rollouts that solve it"><i class=${`cell ${step(task.solved_before, [0, 1])}`}>${percent(task.solved_before)}</i> → <i class=${`cell ${step(task.solved_after, [0, 1])}`}>${percent(task.solved_after)}</i></span></button>`;
      }} />
    ${!tasks.length && html`<p class="none">No task is ${kind}.</p>`}
    <p class="hidden-text">${names.join(" and ")}</p>
  </div>`;
}

function Compared({ compared, runs, kind, open }) {
  const { comparison } = compared;
  const pair = [compared.before, compared.after];
  const names = pair.map((id) => runs.find((run) => run.id === id)?.name || `run ${id}`);
  const main = comparison.scored || comparison.over_all;
  const sure = main.p_value < 0.05;
  const tone = sure ? (main.difference < 0 ? "bad" : "good") : "even";
  const task = compared.tasks.find((each) => `${each.uid}/${each.occurrence}` === open);
  return html`<article class="compared">
    <header class=${`verdict ${tone}`}><span class="big">${signed(main.difference)}</span><div><p class="says">${compared.verdict}</p>
      <p><a href=${link(["run", pair[0]])}>${names[0]}</a> → <a href=${link(["run", pair[1]])}>${names[1]}</a> · ${plural(main.tasks, "task")} in both${comparison.only_before || comparison.only_after ? `, ${comparison.only_before} only before, ${comparison.only_after} only after` : ""}</p></div></header>
    <section class="card"><${Differences} comparison=${comparison} />
      ${comparison.config?.length > 0 && html`<details><summary>${plural(comparison.config.length, "difference")} of config</summary><ul class="plain">${comparison.config.map((line) => html`<li><code>${line}</code></li>`)}</ul></details>`}</section>
    <div class="task-pair"><${Tasks} compared=${compared} runs=${pair} names=${names} kind=${kind} open=${open} onOpen=${(key) => change({ task: key })} />
      ${task ? html`<${Pair} key=${open} runs=${pair} task=${task} names=${names} span=${[0, 1]} />` : html`<p class="none pair">Choose a task to see its answers side by side.</p>`}</div>
  </article>`;
}

export function Compare({ ids, params }) {
  const { answer } = useRuns();
  const { data, error } = useAnswer("compare", { runs: ids, query: params.q || "" });
  const [which, choose] = useState(0);
  useEffect(() => {
    if (data) announce(data.map((each) => each.verdict).join(". "));
  }, [data]);
  if (!data || !answer) return html`<section class="page"><h1 id="title" tabindex="-1">Compare</h1><${Instead} error=${error} /></section>`;
  const compared = data[Math.min(which, data.length - 1)];
  const kind = KINDS.includes(params.kind) ? params.kind : compared.tasks.some((task) => task.kind === "broken") ? "broken" : "fixed";
  const first = compared.tasks.find((task) => task.kind === kind);
  const open = params.task || (first ? `${first.uid}/${first.occurrence}` : null);
  return html`<section class="page wide compare" aria-labelledby="title"><h1 id="title" tabindex="-1">Compare <small>${plural(ids.length, "run")}, paired by task</small></h1>
    ${data.length > 1 && html`<div class="choices" role="tablist" aria-label="Which runs">${data.map((each, at) => html`<button role="tab" class="chip" aria-selected=${at === which} aria-pressed=${at === which} onClick=${() => choose(at)}>${answer.runs.find((run) => run.id === each.after)?.name}: ${signed((each.comparison.scored || each.comparison.over_all).difference)}</button>`)}</div>`}
    <${Compared} compared=${compared} runs=${answer.runs} kind=${kind} open=${open} /></section>`;
}
