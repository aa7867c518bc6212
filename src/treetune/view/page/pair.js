// One task in two runs: its rollouts in each, and two answers side by side with the words that differ.
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { link } from "./address.js";
import { Instead, useAnswer } from "./answer.js";
import { diff } from "./diff.js";
import { plain, visible } from "./format.js";
import { cellClass, cellText, cellTitle } from "./reward.js";

const LONGEST = 20_000;

// Selects the most informative rollouts first: the worst before and the best after; the reverse if the task got worse.
function first({ rollouts }, best) {
  const paid = rollouts.map((each, at) => [each.reward ?? -Infinity, at]).sort((one, other) => (best ? other[0] - one[0] : one[0] - other[0]));
  return paid[0]?.[1] ?? 0;
}

// The question of the task, from the trace of one of its rollouts.
function Question({ run, at }) {
  const { data } = useAnswer("rollout", at == null ? null : { run, at });
  if (!data) return null;
  const asked = (data.trace.turns?.[0]?.observed || []).filter((message) => message.role === "user").map((message) => (typeof message.content === "string" ? message.content : (message.content || []).map((part) => part.text || "[picture]").join(" "))).join("\n");
  return html`<p class="asked" dir="auto">${visible(asked.slice(0, 600))}${data.truth != null && html` <span class="soft">truth</span> <code>${plain(data.truth).slice(0, 200)}</code>`}</p>`;
}

function Side({ side, chosen, onChoose, name, parts, keep, span }) {
  const rollout = side.rollouts[chosen];
  return html`<div class="side"><h3>${name}</h3>
    <div class="cells strip" role="group" aria-label=${`Rollouts of ${name}`}>${side.rollouts.map((each, at) => html`<button class=${`${cellClass(each, span)}${at === chosen ? " on" : ""}`} aria-pressed=${at === chosen} title=${cellTitle({ rollout: at, ...each })} aria-label=${cellTitle({ rollout: at, ...each })} onClick=${() => onChoose(at)}>${cellText(each)}</button>`)}</div>
    ${rollout && html`<p class="soft">answer <code>${plain(rollout.answer ?? "–").slice(0, 200)}</code> · <a href=${link(["run", side.run, "at", rollout.at])}>open</a></p>
      <pre class="speech" dir="auto">${parts.filter(([kind]) => kind === "same" || kind === keep).map(([kind, text]) => (kind === "same" ? text : html`<mark class=${kind}>${text}</mark>`))}</pre>`}
  </div>`;
}

export function Pair({ runs, task, names, span }) {
  const { data, error } = useAnswer("pair", { runs, uid: task.uid, occurrence: task.occurrence });
  const [chosen, choose] = useState([0, 0]);
  const worse = task.kind === "broken";
  useEffect(() => {
    if (data) choose([first(data[0], worse), first(data[1], !worse)]);
  }, [data]);
  if (!data) return html`<${Instead} error=${error} />`;
  const said = data.map((side, at) => visible(side.rollouts[chosen[at]]?.said || "").slice(0, LONGEST));
  const parts = diff(said[0], said[1]);
  return html`<section class="pair card" aria-label=${`Task ${task.task} in both runs`}>
    <h2>Task ${task.task} <small>${task.source} · ${task.kind}</small></h2>
    <${Question} run=${data[0].run} at=${data[0].rollouts[0]?.at} />
    <div class="sides">${data.map((side, at) => html`<${Side} side=${side} chosen=${chosen[at]} name=${names[at]} span=${span} parts=${parts} keep=${at ? "right" : "left"} onChoose=${(which) => choose(at ? [chosen[0], which] : [which, chosen[1]])} />`)}</div>
  </section>`;
}
