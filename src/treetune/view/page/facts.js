// The facts about a rollout: answer and truth, the explanation of its reward, judges, times, marks, commands.
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { ask } from "./api.js";
import { count, number, plain, plural, seconds, visible } from "./format.js";
import { isKept } from "./kept.js";
import { useKeys } from "./keys.js";
import { Content, Text } from "./message.js";
import { copy } from "./screen.js";

export function Answer({ trace, truth, entry }) {
  const answer = trace.answer ?? entry.answer;
  if (answer == null && truth == null) return null;
  const same = answer != null && truth != null && plain(answer).trim() === plain(truth).trim();
  return html`<section class="card answer"><div><h2>Answer${same && html` <span class="badge good">as the truth</span>`}</h2><${Text} text=${answer == null ? "–" : plain(answer)} data /></div>
    <div><h2>Truth</h2><${Text} text=${truth == null ? "–" : plain(truth)} data /></div></section>`;
}

const LANES = [["policy", "policy"], ["environment", "environment"], ["scorer", "scorer"], ["start", "start"], ["paused", "paused"], ["close", "close"]];

// Seconds by component. The time of judges is part of the environment's, and has its own lane.
export function Times({ trace }) {
  const timing = trace.timing || {};
  if (!timing.total) return null;
  const judged = (trace.judgements || []).reduce((sum, judgement) => sum + (judgement.cached ? 0 : judgement.seconds || 0), 0);
  const scorer = timing.scorer ?? judged;
  const spent = { ...timing, scorer, environment: Math.max(0, (timing.environment || 0) - (timing.scorer == null ? Math.min(judged, timing.environment || 0) : 0)) };
  const shown = LANES.filter(([name], at) => at < 3 || spent[name] > 0.01 * (timing.total || 0));
  const total = Math.max(timing.total || 0, 1e-9);
  let from = 0;
  return html`<section class="card"><h2>Time <small>${seconds(timing.total)}</small></h2><ul class="lanes">
    ${shown.map(([name, says]) => {
      const share = Math.min(1, (spent[name] || 0) / total);
      const left = Math.min(from, 1 - share);
      from += share;
      return html`<li><span>${says}</span><span class="track"><i class=${`lane-${name}`} style=${{ marginLeft: `${100 * left}%`, width: `max(2px, ${100 * share}%)` }}></i></span><span class="right">${seconds(spent[name] || 0)}</span></li>`;
    })}</ul></section>`;
}

export function Judges({ judgements }) {
  if (!judgements?.length) return null;
  return html`<section class="card"><h2>Judges</h2>${judgements.map((each) => html`<details class="judge"><summary><b>${visible(each.asked)}</b> ${Object.values(each.verdict || {}).map((verdict) => html`<span class="badge">${visible(verdict)}</span>`)}${each.failure && html`<span class="badge bad">no verdict</span>`} <small>${visible(each.model)}${each.cached ? " · cached" : ` · ${seconds(each.seconds)}`}</small></summary>
    ${each.failure && html`<p class="wrong">${visible(each.failure)}</p>`}<h3>It said</h3><${Text} text=${each.answer || "–"} /><h3>It was asked</h3><${Text} text=${each.prompt} /></details>`)}</section>`;
}

export function Failure({ failure }) {
  if (!failure) return null;
  return html`<section class="card failure" role="note"><h2>${visible(failure.type)} <small>${visible(failure.phase)}${failure.place ? html` · at <code>${visible(failure.place)}</code>` : ""}</small></h2>
    <${Text} text=${failure.message} />${failure.traceback && html`<details><summary>Traceback</summary><${Text} text=${failure.traceback} data /></details>`}</section>`;
}

const MARKS = { good: "✓ good", bad: "✗ bad", look: "◎ look again" };

export function Mark({ run, at, mark, onMark }) {
  const [state, set] = useState({ mark: mark?.mark || null, comment: mark?.comment || "" });
  const [said, say] = useState("");
  useEffect(() => set({ mark: mark?.mark || null, comment: mark?.comment || "" }), [run, at, mark?.mark, mark?.comment]);
  useEffect(() => say(""), [run, at]);
  const save = async (change) => {
    const next = { ...state, ...change };
    set(next);
    try {
      await ask("mark", { run, at, ...next });
      say("Stored next to the run.");
      onMark?.(next);
    } catch (error) {
      say(`${error.message} ${error.remedy || ""}`);
    }
  };
  const toggle = (name) => save({ mark: state.mark === name ? null : name });
  useKeys({ 1: ["mark it good", () => toggle("good")], 2: ["mark it bad", () => toggle("bad")], 3: ["mark it for later", () => toggle("look")] });
  if (isKept()) return state.mark || state.comment ? html`<section class="card"><h2>Mark</h2><p>${MARKS[state.mark] || ""} ${visible(state.comment)}</p></section>` : null;
  return html`<section class="card mark"><h2>Mark</h2><div class="choices" role="group" aria-label="Mark">${Object.entries(MARKS).map(([name, says]) => html`<button class="chip" aria-pressed=${state.mark === name} onClick=${() => toggle(name)}>${says}</button>`)}</div>
    <textarea rows="2" placeholder="A comment" aria-label="Comment" value=${state.comment} onChange=${(event) => save({ comment: event.target.value })}></textarea><p class="said" role="status">${said}</p></section>`;
}

export function Command({ says, text }) {
  const [done, set] = useState(false);
  if (!text) return null;
  const press = async () => {
    await copy(text);
    set(true);
    setTimeout(() => set(false), 1500);
  };
  return html`<div class="command"><span>${says}</span><code>${text}</code><button onClick=${press}>${done ? "Copied" : "Copy"}</button></div>`;
}

function Pairs({ title, values, open = false }) {
  const pairs = Object.entries(values || {}).filter(([, value]) => value != null && value !== "" && !(Array.isArray(value) && !value.length));
  if (!pairs.length) return null;
  const list = html`<dl class="pairs">${pairs.map(([name, value]) => html`<dt>${visible(name)}</dt><dd>${typeof value === "number" ? number(value) : html`<${Text} text=${plain(value)} data />`}</dd>`)}</dl>`;
  return html`<section class="card">${open ? html`<h2>${title}</h2>${list}` : html`<details><summary>${title}</summary>${list}</details>`}</section>`;
}

export function Facts({ run, answer, onMark }) {
  const { trace, entry, truth } = answer;
  const usage = trace.usage || {};
  const task = Object.fromEntries(Object.entries(trace.task || {}).filter(([name]) => name !== "prompt" && name !== "idx"));
  return html`<aside class="facts" aria-label="About this rollout">
    <${Failure} failure=${trace.failure} />
    ${answer.suspicions?.map(({ rule, why }) => html`<section class="card suspicion"><h2>Suspicious <small>${rule}</small></h2><p>${visible(why)}</p></section>`)}
    <${Answer} trace=${trace} truth=${truth} entry=${entry} />
    ${trace.explanation && html`<section class="card"><h2>Why</h2><${Text} text=${trace.explanation} /></section>`}
    <${Pairs} title="Metrics" values=${trace.metrics} open />
    <${Judges} judgements=${trace.judgements} />
    <${Times} trace=${trace} />
    <${Mark} run=${run} at=${answer.at} mark=${answer.mark} onMark=${onMark} />
    <section class="card"><h2>Again</h2><${Command} says="Play the task again" text=${answer.again} /><${Command} says="In the terminal" text=${answer.show} /></section>
    ${trace.warnings?.map((warning) => html`<p class="notice">${visible(warning)}</p>`)}
    <${Pairs} title="About" open values=${{ source: trace.task?.data_source, model: trace.model, step: trace.step, weights: weights(trace), tokens: usage.completion_tokens ? `${count(usage.prompt_tokens)} given, ${count(usage.completion_tokens)} sampled` : null, retries: entry.retries || null, attempt: trace.attempt || null, uid: trace.uid }} />
    ${trace.agent && html`<${Pairs} title="Agent" open values=${{ name: trace.agent.name, ...trace.agent.counts, ...trace.agent.notes, ended: trace.agent.over }} />`}
    <${Pairs} title="Task" values=${task} />
    ${trace.tools?.length > 0 && html`<section class="card"><details><summary>${plural(trace.tools.length, "tool")} offered</summary><${Content} content=${trace.tools} data /></details></section>`}
  </aside>`;
}

function weights({ version, last_version: last, stale }) {
  if (version == null) return null;
  return `version ${version}${last != null && last !== version ? ` to ${last}` : ""}${stale ? ", stale" : ""}`;
}
