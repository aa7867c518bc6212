// The conversation of a rollout, turn by turn, each with its reward and the environment's remarks.
import { html } from "./html.js";
import { number, plain, plural, signed, visible } from "./format.js";
import { Call, callsOf, Message } from "./message.js";
import { Reward } from "./reward.js";

function Info({ info }) {
  const pairs = Object.entries(info || {});
  if (!pairs.length) return null;
  return html`<dl class="info">${pairs.map(([name, value]) => {
    const text = plain(value, 0);
    return html`<div><dt>${visible(name)}</dt><dd title=${text.length > 300 ? null : text}>${text.length > 300 ? `${text.slice(0, 300)}…` : text}</dd></div>`;
  })}</dl>`;
}

function TurnView({ turn, number: which, next, answered, markdown, span, alone, advantage }) {
  const calls = callsOf(turn, next?.observed);
  calls.forEach((call) => call.id && call.result !== undefined && answered.add(call.id));
  const observed = turn.observed.filter((message) => !(message.role === "tool" && answered.has(message.tool_call_id)));
  return html`<li class="turn" id=${`turn-${which}`}>
    ${observed.map((message) => html`<${Message} message=${message} markdown=${markdown} />`)}
    ${turn.message ? html`<${Message} message=${turn.message} markdown=${markdown}>${calls.map((call) => html`<${Call} call=${call} />`)}</${Message}>` : html`<p class="absent">no answer: the rollout ended here</p>`}
    <footer class="turn-end">${!alone && html`<span class="turn-number">turn ${which + 1}</span>`}
      <span class="paid">reward <${Reward} value=${turn.reward ?? 0} span=${span} /></span>
      ${advantage != null && html`<span class="badge" title="what was earned from this turn on, compared with the group">advantage ${signed(advantage)}</span>`}
      ${turn.finish_reason && turn.finish_reason !== "stop" && html`<span class="badge ${turn.finish_reason === "length" ? "warn" : ""}">${visible(turn.finish_reason)}</span>`}
      <${Info} info=${turn.info} /></footer>
  </li>`;
}

export function Chat({ trace, markdown, span, advantages }) {
  const turns = trace.turns || [];
  const answered = new Set();
  return html`<section aria-label="Conversation" class="chat">
    <ol class="turns" aria-label=${plural(turns.length, "turn")}>
      ${turns.map((turn, at) => html`<${TurnView} key=${at} turn=${turn} number=${at} next=${turns[at + 1] || { observed: trace.final || [] }} answered=${answered} markdown=${markdown} span=${span} alone=${turns.length === 1} advantage=${advantages?.[at]} />`)}
    </ol>
    ${!turns.length && html`<p class="absent">It ended before its first turn.</p>`}
    ${(trace.final || []).filter((message) => !(message.role === "tool" && answered.has(message.tool_call_id))).map((message) => html`<${Message} message=${message} markdown=${markdown} />`)}
    ${trace.reward != null && turns.length > 1 && html`<p class="sum">reward of the rollout: <b>${number(trace.reward)}</b></p>`}
  </section>`;
}
