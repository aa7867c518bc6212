// Run: an overview of its results. Every figure links to the rollouts behind it.
import { html } from "./html.js";
import { go, link } from "./address.js";
import { Chart, Interval } from "./chart.js";
import { useRuns } from "./follow.js";
import { amount, count, date, number, percent, plural, seconds } from "./format.js";
import { Outcome, spanOf } from "./reward.js";
import { Curve, PassAt, lastPart } from "./runs.js";
import { Timeline } from "./timeline.js";

function Figure({ says, children, small }) {
  return html`<div class="figure-card"><dt>${says}</dt><dd>${children}${small && html` <small>${small}</small>`}</dd></div>`;
}

const FLAGS = [["all0", "all 0", "all0"], ["mixed", "mixed", "mixed"], ["all1", "all 1", "all1"], ["other", "no spread", ""], ["failed", "all failed", "allfailed"]];

function GroupFlags({ run, flags }) {
  const total = Object.values(flags).reduce((sum, many) => sum + many, 0) || 1;
  const shown = FLAGS.filter(([name]) => flags[name]);
  return html`<section class="card wide" aria-label="Groups by result"><h2>Groups <small>only mixed ones have an advantage to learn from</small></h2>
    <div class="stack">${shown.map(([name, says, query]) => html`<a class=${`part flag-${name}`} style=${{ flexGrow: flags[name] }} href=${link(["run", run, "groups"], { q: query })}
      aria-label=${`${flags[name]} groups ${says}`}><b>${count(flags[name])}</b> ${says} <small>${percent(flags[name] / total)}</small></a>`)}</div></section>`;
}

function Sources({ run, sources }) {
  const errors = sources.map(({ mean, stderr }) => [mean, 1.96 * (stderr || 0)]).filter(([mean]) => mean != null);
  const [low, high] = [Math.min(0, ...errors.map(([mean, by]) => mean - by)), Math.max(1, ...errors.map(([mean, by]) => mean + by))];
  return html`<section class="card"><h2>By source</h2><table><thead><tr><th scope="col">Source</th><th class="right" scope="col">Tasks</th><th class="right" scope="col">Scored</th><th class="right" scope="col">Mean</th><th scope="col"><span class="hidden-text">With its error</span></th></tr></thead>
    <tbody>${sources.map((source) => html`<tr><th scope="row"><a href=${link(["run", run, "groups"], { q: `source="${source.name}"` })}>${source.name || "–"}</a></th>
      <td class="right">${count(source.tasks)}</td><td class="right">${count(source.scored)}<small>/${count(source.rollouts)}</small></td><td class="right strong">${number(source.mean)}</td>
      <td>${source.mean != null && html`<${Interval} value=${source.mean} error=${source.stderr} low=${low} high=${high} />`}</td></tr>`)}</tbody></table></section>`;
}

function Metrics({ run, metrics }) {
  return html`<section class="card"><h2>By metric</h2><table><thead><tr><th scope="col">Metric</th><th class="right" scope="col">Mean</th><th class="right" scope="col">Low</th><th class="right" scope="col">High</th><th class="right" scope="col">Rollouts</th></tr></thead>
    <tbody>${metrics.map((metric) => html`<tr><th scope="row"><a href=${link(["run", run, "rollouts"], { sort: metric.name })}>${metric.name}</a></th><td class="right strong">${number(metric.mean)}</td><td class="right">${number(metric.low)}</td><td class="right">${number(metric.high)}</td><td class="right">${count(metric.count)}</td></tr>`)}</tbody></table></section>`;
}

function OutcomeList({ run, outcomes, total }) {
  const kinds = Object.entries(outcomes).sort((one, other) => other[1] - one[1]);
  return html`<section class="card"><h2>Outcomes</h2><ul class="bars">${kinds.map(([name, many]) => html`<li><a href=${link(["run", run, "rollouts"], { q: `outcome=${name}` })}><${Outcome} name=${name} /></a>
    <span class="track"><i class=${`o-${name}`} style=${{ width: `${(100 * many) / (total || 1)}%` }}></i></span><span class="right">${count(many)} <small>${percent(many / (total || 1))}</small></span></li>`)}</ul></section>`;
}

function Failures({ run, failures }) {
  return html`<section class="card wide"><h2>Failures <small>by type and the line of your own code</small></h2><table><thead><tr><th class="right" scope="col">Rollouts</th><th scope="col">Failure</th><th class="c-outcome" scope="col">Outcome</th><th scope="col"><span class="hidden-text">Look</span></th></tr></thead>
    <tbody>${failures.map(({ failure, count: many, at, outcome }) => html`<tr><td class="right strong">${count(many)}</td><td class="wraps"><code>${failure}</code></td><td class="c-outcome"><${Outcome} name=${outcome} /></td>
      <td class="right"><a href=${link(["run", run, "at", at])}>one of them</a> · <a href=${link(["run", run, "rollouts"], { q: `failure="${failure.replace(/[\\"]/g, "\\$&")}"` })}>all</a></td></tr>`)}</tbody></table></section>`;
}

function By({ rows, names, title, label, pick }) {
  const x = rows.map((_, at) => at);
  return html`<section class="card"><${Chart} kind="curve" title=${title} label=${label} x=${x} names=${names}
    series=${[{ name: "rollouts", role: "columns", scale: "count", values: rows.map((row) => row.rollouts) }, { name: "mean reward", values: rows.map((row) => row.mean) }]} onPick=${pick} /></section>`;
}

export function RunView({ run, info }) {
  const span = spanOf(info);
  const { edges, counts } = info.histogram || { edges: [], counts: [] };
  const find = (query) => go(["run", run, "rollouts"], { q: query });
  const bin = (at) => find(`reward>=${edges[at]} & reward<${at === counts.length - 1 ? "=" : ""}${edges[at + 1]}`);
  const failed = info.rollouts - info.scored;
  return html`<section class="page" aria-labelledby="title">
    <div class="line about">${info.model && html`<span>model <b>${info.model}</b></span>`}${info.taskset && html`<span title=${info.taskset}>taskset <b>${lastPart(info.taskset)}</b></span>`}${info.fingerprint && html`<span>print <code>${info.fingerprint}</code></span>`}<span class="gap"></span><${CompareWith} run=${run} /></div>
    <dl class="figures">
      <${Figure} says="Mean reward" small=${`± ${number(info.stderr)}`}>${number(info.mean)}</${Figure}>
      <${Figure} says="pass@k"><${PassAt} rates=${info.pass_at} /></${Figure}>
      <${Figure} says="Rollouts" small=${`of ${plural(info.tasks, "task")}`}>${count(info.rollouts)}</${Figure}>
      <${Figure} says="Failed" small=${failed ? percent(failed / info.rollouts) : ""}>${count(failed)}</${Figure}>
      ${info.completion_tokens > 0 && html`<${Figure} says="Tokens sampled" small=${`${amount(info.prompt_tokens)} given`}>${amount(info.completion_tokens)}</${Figure}>`}
      ${info.seconds != null && html`<${Figure} says="Retries">${count(info.retries)}</${Figure}>
      <${Figure} says="Took" small=${info.began ? date(info.began) : ""}>${seconds(info.seconds)}</${Figure}>`}
    </dl>
    <${Warnings} warnings=${info.warnings || []} />
    <div class="cards">
      ${info.group_flags && html`<${GroupFlags} run=${run} flags=${info.group_flags} />`}
      ${info.steps?.length > 1 && html`<section class="card wide"><${Curve} steps=${info.steps} title="Mean reward over steps" /></section>`}
      ${counts.length > 0 && html`<section class="card"><${Chart} kind="columns" title="Rewards" label="reward" x=${edges.slice(0, -1)} range=${[edges[0], edges[edges.length - 1]]} series=${[{ name: "rollouts", values: counts }]} onPick=${bin} /></section>`}
      <${OutcomeList} run=${run} outcomes=${info.outcomes || {}} total=${info.rollouts} />
      ${(info.sources?.length > 1 || info.sources?.[0]?.name) && html`<${Sources} run=${run} sources=${info.sources} />`}
      ${info.metrics?.length > 0 && html`<${Metrics} run=${run} metrics=${info.metrics} />`}
      ${info.by_turns?.length > 1 && html`<${By} rows=${info.by_turns} names=${info.by_turns.map((row) => row.turns)} title="Reward by turns" label="turns" pick=${(at) => find(`turns=${info.by_turns[at].turns}`)} />`}
      ${info.by_tokens?.length > 1 && html`<${By} rows=${info.by_tokens} names=${info.by_tokens.map((row) => amount(row.low))} title="Reward by length" label="tokens sampled, from" pick=${(at) => find(`tokens>=${info.by_tokens[at].low} & tokens<${info.by_tokens[at].high}`)} />`}
      ${info.failures?.length > 0 && html`<${Failures} run=${run} failures=${info.failures} />`}
      ${info.timeline?.some((each) => each.seconds > 0) && html`<section class="card wide"><${Timeline} run=${run} rollouts=${info.timeline} span=${span} /></section>`}
      <${Config} info=${info} />
    </div>
  </section>`;
}

// Runs are compared in the order of the list, whichever of them is open.
function CompareWith({ run }) {
  const others = (useRuns().answer?.runs || []).filter((other) => other.id !== run);
  if (!others.length) return null;
  const choose = (other) => go(["compare", [run, other].sort((a, b) => a - b).join(",")]);
  return html`<label class="pick">Compare with <select value="" onChange=${(event) => choose(Number(event.target.value))}><option value="" disabled>another run…</option>
    ${others.map((other) => html`<option value=${other.id}>${other.name} (${number(other.mean)})</option>`)}</select></label>`;
}

function Warnings({ warnings }) {
  if (!warnings.length) return null;
  const [first, ...others] = warnings;
  if (!others.length) return html`<p class="notice">${first}</p>`;
  return html`<details class="notice"><summary>${first} <small>and ${others.length} more</small></summary><ul class="plain">${others.map((warning) => html`<li>${warning}</li>`)}</ul></details>`;
}

// The settings, one per line: taskset.num_tasks 200.
function flatten(values, before = "") {
  return Object.entries(values).flatMap(([name, value]) => {
    if (value == null || value.length === 0) return [];
    return typeof value === "object" && !Array.isArray(value) ? flatten(value, `${before}${name}.`) : [[before + name, value]];
  });
}

function Config({ info }) {
  const overridden = flatten(info.overridden || {});
  return html`<section class="card wide"><h2>Config <small>${info.taskset} · ${info.path}</small></h2>
    ${overridden.length > 0 && html`<dl class="pairs">${overridden.map(([name, value]) => html`<dt>${name}</dt><dd><code>${typeof value === "string" ? value : JSON.stringify(value)}</code></dd>`)}</dl>`}
    ${info.config && html`<details><summary>config.yaml</summary><pre class="data">${info.config}</pre></details>`}
  </section>`;
}
