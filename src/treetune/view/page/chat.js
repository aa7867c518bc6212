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

// One answer and what came before it. `later` are the messages in which results of its tools may be.
export function TurnView({ as = "li", turn, id, later, answered, markdown, children }) {
  const withCalls = (message, calls) => {
    calls.forEach((call) => call.id && call.result !== undefined && answered.add(call.id));
    return html`<${Message} message=${message} markdown=${markdown}>${calls.map((call) => html`<${Call} call=${call} />`)}</${Message}>`;
  };
  const isNew = (message) => !(message.role === "tool" && answered.has(message.tool_call_id));
  const answer = turn.message && withCalls(turn.message, callsOf(turn, later));
  return html`<${as} class="turn" id=${id}>
    ${turn.observed.map((message) => isNew(message) && withCalls(message, callsOf({ message }, turn.observed)))}
    ${answer || html`<p class="absent">no answer: the rollout ended here</p>`}
    <footer class="turn-end">${children}
      ${turn.finish_reason && turn.finish_reason !== "stop" && html`<span class="badge ${turn.finish_reason === "length" ? "warn" : ""}">${visible(turn.finish_reason)}</span>`}
      <${Info} info=${turn.info} /></footer>
  </${as}>`;
}

export function Chat({ trace, markdown, span, advantages }) {
  const turns = trace.turns || [];
  const answered = new Set();
  return html`<section aria-label="Conversation" class="chat">
    <ol class="turns" aria-label=${plural(turns.length, "turn")}>
      ${turns.map((turn, at) => html`<${TurnView} key=${at} turn=${turn} id=${`turn-${at}`} later=${turns[at + 1]?.observed || trace.final || []} answered=${answered} markdown=${markdown}>
        ${turns.length > 1 && html`<span class="turn-number">turn ${at + 1}</span>`}
        <span class="paid">reward <${Reward} value=${turn.reward ?? 0} span=${span} /></span>
        ${advantages?.[at] != null && html`<span class="badge" title="what was earned from this turn on, compared with the group">advantage ${signed(advantages[at])}</span>`}
      </${TurnView}>`)}
    </ol>
    ${!turns.length && html`<p class="absent">It ended before its first turn.</p>`}
    ${(trace.final || []).filter((message) => !(message.role === "tool" && answered.has(message.tool_call_id))).map((message) => html`<${Message} message=${message} markdown=${markdown} />`)}
    ${trace.reward != null && turns.length > 1 && html`<p class="sum">reward of the rollout: <b>${number(trace.reward)}</b></p>`}
  </section>`;
}
