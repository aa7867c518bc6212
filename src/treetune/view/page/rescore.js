// Rescore: the rewards that the task's current code would give to these rollouts, next to the recorded ones. A preview; nothing is written.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { link } from "./address.js";
import { Trouble } from "./answer.js";
import { ask } from "./api.js";
import { number, plural, signed, visible } from "./format.js";
import { QueryBar, useQueryWords } from "./query.js";
import { Recycled } from "./recycled.js";
import { Reward, spanOf } from "./reward.js";

export function Rescore({ run, info, params }) {
  const query = params.q || "";
  const [state, set] = useState({});
  const [only, setOnly] = useState(true);
  const words = useQueryWords(run, info);
  const start = async () => {
    set({ waits: true });
    try {
      set({ data: await ask("rescore", { run, query }), query });
    } catch (error) {
      set({ error });
    }
  };
  const { data } = state;
  const rows = data ? data.rows.filter((row) => !only || row.before !== row.after) : [];
  const span = spanOf(info);
  return html`<section class="fill" aria-labelledby="title">
    <${QueryBar} query=${query} words=${words}><button class="main" disabled=${state.waits} onClick=${start}>${state.waits ? "Scoring…" : "Score again"}</button></${QueryBar}>
    ${state.error && html`<${Trouble} error=${state.error} />`}
    ${data?.refused && html`<${Trouble} error=${{ message: "This run cannot be scored again here.", remedy: data.refused }} />`}
    ${!data && !state.error && html`<p class="none">Scores the rollouts that the query selects with the task's code as it is now, and shows what would change. Nothing is written.</p>`}
    ${data && !data.refused && html`<div class="under" role="status"><span>${plural(data.rows.length, "rollout")} scored again: <b>${data.changed}</b> changed, ${data.failed} failed${state.query !== query ? " (of the query before)" : ""}</span>
      <label class="pick"><input type="checkbox" checked=${only} onChange=${() => setOnly(!only)} /> only what changed</label></div>
      <div class="table"><${Recycled} name=${`rescore ${run}`} count=${rows.length} height=${34} tabindex="0" role="list" aria-label="Rollouts scored again"
        row=${(at) => html`<a class="rescore-row" role="listitem" href=${link(["run", run, "at", rows[at].at])}><span class="c-task">${rows[at].task}<small>/${rows[at].rollout}</small></span><${Reward} value=${rows[at].before} span=${span} /><span>→</span><${Reward} value=${rows[at].after} span=${span} /><span class="figure">${rows[at].before != null && rows[at].after != null ? signed(rows[at].after - rows[at].before) : ""}</span><span class="why" dir="auto">${visible(rows[at].why || "")}</span></a>`} />
      ${!rows.length && html`<p class="none">${data.rows.length ? `All ${number(data.rows.length)} keep their reward.` : "No rollout fits."}</p>`}</div>`}
  </section>`;
}
