// Suspicious: rollouts that were rewarded although they should not be, by the rules of `treetune audit`.
import { html } from "./html.js";
import { change, link } from "./address.js";
import { Instead, useAnswer } from "./answer.js";
import { count, plural, visible } from "./format.js";
import { Recycled } from "./recycled.js";
import { Reward, spanOf } from "./reward.js";
import { useNarrow } from "./screen.js";

export function Suspicious({ run, info, params, version }) {
  const { data, error } = useAnswer("suspicious", { run }, version);
  const narrow = useNarrow();
  if (!data) return html`<${Instead} error=${error} />`;
  const rows = params.rule ? data.rows.filter((row) => row.rule === params.rule) : data.rows;
  const span = spanOf(info);
  return html`<section class="fill suspicious" aria-labelledby="title">
    <div class="rules" role="group" aria-label="Rules">${data.rules.map((rule) => html`<button class="rule" aria-pressed=${params.rule === rule.rule} disabled=${!rule.count && params.rule !== rule.rule} onClick=${() => change({ rule: params.rule === rule.rule ? null : rule.rule })}>
      <span><b>${count(rule.count)}</b> ${rule.rule}</span><small>expected: ${rule.means}</small>${rule.count > 0 && rule.remedy && html`<small class="remedy">${rule.remedy}</small>`}</button>`)}</div>
    <div class="under"><span>${plural(rows.length, "suspicion")}${params.rule ? ` of ${params.rule}` : ""} · ${plural(data.checked, "rollout")} looked at${data.left ? `, ${count(data.left)} not` : ""}</span></div>
    <div class="table"><${Recycled} name=${`suspicious ${run} ${params.rule || ""}`} count=${rows.length} height=${narrow ? 58 : 34} tabindex="0" role="list" aria-label="Suspicious rollouts"
      row=${(at) => html`<a class="suspect-row" role="listitem" href=${link(["run", run, "at", rows[at].at], { rule: params.rule || "all" })}><span class="c-task">${rows[at].task}<small>/${rows[at].rollout}</small></span><${Reward} value=${rows[at].reward} span=${span} /><span class="badge">${rows[at].rule}</span><span class="why" dir="auto">${visible(rows[at].why)}</span></a>`} />
      ${!rows.length && html`<p class="none">Nothing suspicious was found.</p>`}</div>
  </section>`;
}
