// Runs: a table of all runs with their results; selected runs can be compared.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { change, go, link } from "./address.js";
import { ask } from "./api.js";
import { Instead } from "./answer.js";
import { Chart, Spark } from "./chart.js";
import { refresh, useRuns } from "./follow.js";
import { amount, count, date, number, plural, seconds } from "./format.js";
import { isKept } from "./kept.js";
import { useKeys } from "./keys.js";

const COLUMNS = [
  ["name", "Run"], ["taskset", "Taskset"], ["model", "Model"], ["mean", "Mean reward", 1], ["spark", ""], ["pass", "pass@k", 1], ["tasks", "Tasks", 1],
  ["rollouts", "Rollouts", 1], ["failed", "Outcomes", 1], ["tokens", "Tokens", 1], ["retries", "Retries", 1], ["seconds", "Took", 1], ["began", "Began", 1], ["fingerprint", "Print"],
];
const SORTS = {
  failed: (run) => run.rollouts - run.scored,
  tokens: (run) => run.completion_tokens,
  pass: (run) => Object.values(run.pass_at || {})[0],
};

function sorted(runs, sort, descending) {
  const value = SORTS[sort] || ((run) => run[sort]);
  const sign = descending ? -1 : 1;
  return [...runs].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a == null || b == null) return (a == null) - (b == null);
    return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  });
}

function fits(run, text) {
  const all = [run.name, run.taskset, run.model, run.kind, run.fingerprint, ...run.tags].join(" ").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}

export function Outcomes({ outcomes, total }) {
  const kinds = Object.entries(outcomes || {}).sort((one, other) => other[1] - one[1]);
  return html`<span class="outcomes" role="img" title=${kinds.map(([name, many]) => `${many} ${name.replace("_", " ")}`).join(", ")}
    aria-label=${kinds.map(([name, many]) => `${many} ${name.replace("_", " ")}`).join(", ")}>
    ${kinds.map(([name, many]) => html`<i class=${`o-${name}`} style=${{ flexGrow: many / (total || 1) }}></i>`)}
  </span>`;
}

function Tags({ run }) {
  const [edits, set] = useState(false);
  const save = async (event) => {
    event.preventDefault();
    const tags = new FormData(event.currentTarget).get("tags").split(/[\s,]+/).filter(Boolean);
    set(false);
    await ask("tag", { run: run.id, tags });
    await refresh();
  };
  if (edits) return html`<form class="tags" onSubmit=${save}><input name="tags" value=${run.tags.join(" ")} aria-label=${`Tags of ${run.name}`} ref=${(input) => input?.focus()} onBlur=${(event) => event.target.form.requestSubmit()} /></form>`;
  return html`<span class="tags">${run.tags.map((tag) => html`<button class="tag" onClick=${() => change({ filter: tag })}>${tag}</button>`)}
    ${!isKept() && html`<button class="quiet add" onClick=${() => set(true)} aria-label=${`Tag ${run.name}`}>${run.tags.length ? "✎" : "+ tag"}</button>`}</span>`;
}

// The end of a path is its most informative part.
export function lastPart(text) {
  return (text || "").split("/").pop();
}

export function PassAt({ rates }) {
  const known = Object.entries(rates || {});
  const [first, last] = [known[0], known[known.length - 1]];
  if (!first) return html`<span>–</span>`;
  return html`<span title=${known.map(([k, rate]) => `pass@${k} ${number(rate)}`).join(", ")}>${number(first[1], 2)}<small> @${first[0]}</small>${last !== first ? html` <small>→</small> ${number(last[1], 2)}<small> @${last[0]}</small>` : ""}</span>`;
}

export function Runs({ params }) {
  const { answer, error } = useRuns();
  const chosen = (params.with || "").split(",").filter(Boolean).map(Number);
  const compare = () => go(["compare", [...chosen].sort((a, b) => a - b).join(",")]); // in the order of the list
  useKeys({ c: ["compare the selected runs", () => chosen.length > 1 && compare()] });
  if (!answer) return html`<${Instead} error=${error} />`;
  const { sort = "began", filter = "" } = params;
  const descending = sort === "began" ? !params.up : Boolean(params.down);
  const runs = sorted(answer.runs.filter((run) => fits(run, filter)), sort, descending);
  const press = (name) => {
    const turned = name === sort ? !descending : ["mean", "pass", "began"].includes(name);
    change({ sort: name, up: name === "began" && !turned, down: name !== "began" && turned });
  };
  const choose = (id) => change({ with: (chosen.includes(id) ? chosen.filter((each) => each !== id) : [...chosen, id]).join(",") });
  return html`<section class="page wide" aria-labelledby="title">
    <div class="head"><h1 id="title" tabindex="-1">Runs <small>${answer.place} · ${plural(answer.runs.length, "run")}</small></h1>
      <input class="filter" type="search" placeholder="Filter by name, model, tag" aria-label="Filter runs" value=${filter} onInput=${(event) => change({ filter: event.target.value })} />
      <button class="main" disabled=${chosen.length < 2} onClick=${compare}>${chosen.length < 2 ? "Choose two to compare" : `Compare ${chosen.length} runs`}</button></div>
    ${answer.curve?.length > 1 && html`<section class="card curve"><${Curve} steps=${answer.curve} title="Mean reward over the steps of the training" /></section>`}
    <div class="scrolls"><table class="runs">
      <thead><tr><th class="check"><span class="hidden-text">Compare</span></th>${COLUMNS.map(([name, says, right]) => html`<th class=${right ? "right" : ""} scope="col" aria-sort=${name === sort ? (descending ? "descending" : "ascending") : null}>
        ${says ? html`<button onClick=${() => press(name)}>${says}${name === sort ? (descending ? " ↓" : " ↑") : ""}</button>` : html`<span class="hidden-text">Over the run</span>`}</th>`)}</tr></thead>
      <tbody>${runs.map((run) => html`<tr key=${run.id} class=${chosen.includes(run.id) ? "chosen" : ""}>
        <td class="check"><input type="checkbox" checked=${chosen.includes(run.id)} onChange=${() => choose(run.id)} aria-label=${`Compare ${run.name}`} /></td>
        <th scope="row"><a href=${link(["run", run.id])}>${run.name}</a>${run.pending && html` <small>reading…</small>`}${run.error && html` <span class="badge bad" title=${run.error}>${run.error}</span>`}${run.live && html` <span class="live" title="still being written">live</span>`}${run.kind !== "treetune" && html` <span class="badge">${run.kind}</span>`}<${Tags} run=${run} /></th>
        <td class="c-taskset" title=${run.taskset}>${lastPart(run.taskset)}</td><td class="c-model">${run.model}</td>
        <td class="right strong c-mean">${number(run.mean)} <small title="standard error">± ${number(run.stderr)}</small></td>
        <td class="c-spark"><${Spark} values=${run.spark || []} /></td>
        <td class="right c-pass"><${PassAt} rates=${run.pass_at} /></td>
        <td class="right c-tasks">${count(run.tasks)}</td><td class="right c-rollouts">${count(run.rollouts)}<span class="unit"> rollouts</span></td>
        <td class="c-failed"><${Outcomes} outcomes=${run.outcomes} total=${run.rollouts} /></td>
        <td class="right" title=${`${count(run.prompt_tokens)} given, ${count(run.completion_tokens)} sampled`}>${amount(run.completion_tokens)}</td>
        <td class="right">${run.retries ? count(run.retries) : ""}</td><td class="right">${seconds(run.seconds)}</td><td class="right">${date(run.began)}</td>
        <td><code>${run.fingerprint}</code></td></tr>`)}</tbody>
    </table></div>
    ${!runs.length && html`<p class="none">No run fits.</p>`}
  </section>`;
}

// Mean reward over steps, for all sources together and for each.
export function Curve({ steps, title }) {
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.sources || {})))];
  const series = [{ name: "all", values: steps.map((step) => step.mean) }];
  if (names.length > 1) series.push(...names.map((name) => ({ name, values: steps.map((step) => step.sources[name] ?? null), dash: [4, 3] })));
  return html`<${Chart} kind="curve" title=${title} label="step" x=${steps.map((step) => step.step)} series=${series} />`;
}
