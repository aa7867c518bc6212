// The calls of an agent in their order, each in the lane of its conversation: the main one, sub-agents, side calls.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { TurnView } from "./chat.js";
import { plural, seconds, visible } from "./format.js";

const MOST_LANES = 12;

// Conversations with the calls that began in them, and the lane in which each is drawn. The main agent has the first
// lane; any other lane is used again when its conversation has ended.
export function lanesOf({ calls, lineage }, names) {
  const found = lineage.map((line, at) => ({ ...line, name: names[at], own: line.trained, first: line.trained[0], last: line.trained.at(-1) }));
  const known = new Set(found.flatMap((lane) => lane.own));
  const own = calls.map((_, at) => at).filter((at) => !known.has(at));
  if (own.length) found.push({ kind: "", name: "without token ids", calls: own, own, first: own[0], last: own.at(-1), origin: null });
  const ends = [];
  for (const lane of [...found].sort((one, other) => one.first - other.first)) {
    let column = lane.kind === "main" || lane.kind === "compaction" ? 0 : 1;
    while (ends[column] >= lane.first) column += 1;
    ends[column] = lane.last;
    lane.column = Math.min(column, MOST_LANES - 1);
  }
  return found;
}

export const rewrites = (lane) => lane.origin != null && lane.calls[0] === lane.first;

// What is to say where a conversation begins.
export function beginning(lane) {
  if (lane.calls[0] !== lane.first) return `It continues from call ${lane.calls[lane.calls.indexOf(lane.first) - 1] + 1}.`;
  if (lane.origin != null) return `The agent changed its history after call ${lane.origin + 1}, so a new sequence begins.`;
  return lane.kind === "compaction" ? "The agent begins anew, with another history." : null;
}

export function AgentCalls({ agent, names, markdown }) {
  const [only, setOnly] = useState(null);
  const lanes = lanesOf(agent, names);
  const inOrder = [...lanes].sort((one, other) => one.column - other.column || one.first - other.first);
  const wide = 1 + Math.max(0, ...lanes.map((lane) => lane.column));
  const laneOf = (call) => lanes.find((lane) => lane.own.includes(call));
  const shown = lanes.find((lane) => lane.name === only)?.calls.filter((at) => at in agent.calls) ?? agent.calls.map((_, at) => at);
  const answered = new Map(lanes.map((lane) => [lane, new Set()]));
  // The messages that follow a call, in which the results of its tools are.
  const after = (call) => lanes.flatMap(({ calls }) => agent.calls[calls[calls.indexOf(call) + 1 || calls.length]]?.observed || []);
  return html`<section class="chat agent" aria-label="Calls of the agent">
    <header class="choices" role="group" aria-label="Conversations"><b>${plural(agent.calls.length, "call")} of the model</b>
      ${lanes.length > 1 && inOrder.map((lane) => html`<button class="chip" aria-pressed=${only === lane.name} onClick=${() => setOnly(only === lane.name ? null : lane.name)}>${visible(lane.name)} <small>${plural(lane.calls.length, "call")}</small></button>`)}</header>
    <ol class="turns" aria-label=${plural(shown.length, "call")}>${shown.map((at) => {
      const lane = laneOf(at);
      const says = at === lane.first && beginning(lane);
      return html`<li key=${at} class="agent-call">
        ${wide > 1 && html`<div class="track-lines" aria-hidden="true">${Array.from({ length: wide }, (_, column) => html`<i class=${lane.column === column ? "here" : lanes.some((each) => each.column === column && each.first < at && at < each.last) ? "on" : ""}></i>`)}</div>`}
        <div>${says && html`<p class=${rewrites(lane) ? "break" : "absent"} role="note">${says}</p>`}
          <${TurnView} as="div" turn=${agent.calls[at]} id=${`call-${at}`} later=${after(at)} answered=${answered.get(lane)} markdown=${markdown}>
            <span class="turn-number">call ${at + 1}</span>${lanes.length > 1 && html`<span class="badge">${visible(lane.name)}</span>`}${lane.model && html`<span>${visible(lane.model)}</span>`}<span>${seconds(agent.calls[at].policy_seconds)}</span>
          </${TurnView}></div>
      </li>`;
    })}</ol>
    ${!agent.calls.length && html`<p class="absent">The agent did not call the model.</p>`}
  </section>`;
}
