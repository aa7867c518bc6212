// Tokens: the data of a trainer. Sampled tokens are coloured by the policy's certainty; tokens given to it are
// grey. A long sequence is cut into blocks, and only those near the screen are elements.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { html, pure } from "./html.js";
import { Instead, useAnswer } from "./answer.js";
import { change, read } from "./address.js";
import { beginning, rewrites } from "./agent.js";
import { count, number, percent, plural, visible } from "./format.js";
import { Minimap } from "./minimap.js";

const LEAST = 300;
const MOST = 600;
const SURPRISE = 6;
const WAYS = { surprise: "surprise (−logprob)", probability: "probability", version: "weights' version", none: "sampled only" };

// Cuts at the end of a line if possible, so that a block looks like a paragraph.
export function blocks(sequence) {
  const found = [];
  let from = 0;
  const { ids, texts } = sequence;
  for (let at = 0; at < ids.length; at += 1) {
    const long = at - from >= MOST || (at - from >= LEAST && texts && texts[at]?.includes("\n"));
    if (long) {
      found.push([from, at + 1]);
      from = at + 1;
    }
  }
  if (from < ids.length) found.push([from, ids.length]);
  return found;
}

function colourOf(sequence, at, way) {
  if (!sequence.mask[at]) return "given";
  const logprob = sequence.logprobs[at];
  if (way === "version") return sequence.versions.length && sequence.versions[at] >= 0 ? `sampled v${sequence.versions[at] % 6}` : "sampled";
  if (way === "none" || logprob == null || !sequence.logprobs.length) return "sampled";
  const share = way === "surprise" ? -logprob / SURPRISE : 1 - Math.exp(logprob);
  return `sampled s${Math.round(10 * Math.min(1, Math.max(0, share)))}`;
}

export function describe(sequence, at) {
  const parts = [`id ${sequence.ids[at]}`, sequence.mask[at] ? "sampled" : "given"];
  const logprob = sequence.logprobs[at];
  if (sequence.mask[at] && logprob != null) parts.push(`logprob ${number(logprob)}`, `probability ${percent(Math.exp(logprob))}`);
  if (sequence.versions[at] >= 0) parts.push(`weights ${sequence.versions[at]}`);
  parts.push(`place ${count(at)}`);
  return parts.join(" · ");
}

function shown(sequence, at) {
  const text = sequence.texts?.[at];
  if (text == null) return `${sequence.ids[at]}\u2009`;
  return text === "" ? "∅" : visible(text).replace(/\n/g, "↵\n").replace(/\t/g, "⇥");
}

const Block = pure(({ sequence, from, to, way }) => {
  const box = useRef(null);
  const [near, set] = useState(false);
  const height = useRef(null);
  useEffect(() => {
    const observer = new IntersectionObserver(([entry]) => {
      if (!entry.isIntersecting) height.current = entry.boundingClientRect.height || height.current;
      set(entry.isIntersecting);
    }, { root: document.getElementById("main"), rootMargin: "800px" });
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const guess = `${height.current || Math.ceil((to - from) / 18) * 22}px`;
  const tokens = [];
  if (near) for (let at = from; at < to; at += 1) tokens.push(html`<span class=${`token ${colourOf(sequence, at, way)}`} data-at=${at}>${shown(sequence, at)}</span>`);
  return html`<div class="block" ref=${box} style=${near ? {} : { height: guess }}>${tokens}</div>`;
});

function Sequence({ sequence, lane, which, total, way, onHover }) {
  const sampled = sequence.mask.reduce((sum, each) => sum + each, 0);
  const known = sequence.logprobs.length ? sequence.logprobs.filter((_, at) => sequence.mask[at]) : [];
  const mean = known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
  const says = lane ? beginning(lane) : sequence.breaks_history && "The history breaks here: the chat template rewrote earlier messages, so a new sequence begins.";
  const box = useRef(null);
  // Scroll to the block first, which then shows its tokens.
  const goTo = (at) => {
    const which = blocks(sequence).findIndex(([from, to]) => at >= from && at < to);
    box.current.children[which]?.scrollIntoView({ block: "center" });
    setTimeout(() => {
      const token = box.current?.querySelector(`[data-at="${at}"]`);
      token?.scrollIntoView({ block: "center" });
      token?.classList.add("found");
      onHover(describe(sequence, at));
    }, 120);
  };
  const over = (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) onHover(describe(sequence, Number(at)));
  };
  return html`<section class="sequence" aria-label=${`Sequence ${which + 1} of ${total}`}>
    ${says && html`<p class=${lane && !rewrites(lane) ? "absent" : "break"} role="note">${says}</p>`}
    <header><b>Sequence ${which + 1}</b> ${lane && html`<span class="badge">${visible(lane.name)}</span><span>trains ${lane.own.length === 1 ? "call" : "calls"} ${lane.own.map((call) => call + 1).join(", ")}</span>`} <span>${plural(sequence.ids.length, "token")}: ${count(sampled)} sampled, ${count(sequence.ids.length - sampled)} given</span>
      ${mean != null && html`<span title="how many tokens the policy in effect chose among">mean logprob ${number(mean)}, perplexity ${number(Math.exp(-mean), 2)}</span>`}
      ${sequence.realigned > 0 && html`<span class="badge warn" title="prompts that continue the sampled tokens although the template would write them differently">realigned ${sequence.realigned}×</span>`}
      ${!sequence.logprobs.length && html`<span class="badge">no logprobs</span>`}</header>
    ${sequence.logprobs.length > 40 && html`<${Minimap} sequence=${sequence} onPick=${goTo} />`}
    <div class="tokens" ref=${box} tabindex="0" role="group" aria-label="Tokens" onMouseOver=${over}>
      ${blocks(sequence).map(([from, to]) => html`<${Block} key=${from} sequence=${sequence} from=${from} to=${to} way=${way} />`)}
    </div>
  </section>`;
}

export function Tokens({ run, at, has, lanes, version }) {
  const { data, error } = useAnswer("tokens", has ? { run, at } : null, version);
  const [tip, setTip] = useState("");
  const way = WAYS[read().params.way] ? read().params.way : "surprise";
  if (!has) return html`<p class="none">The trace of this rollout has no tokens: its policy returned only text.</p>`;
  if (!data) return html`<${Instead} error=${error} />`;
  const scale = way === "surprise" ? ["sure", `${SURPRISE} nats`] : ["100 %", "0 %"];
  return html`<div class="token-view">
    <div class="under"><label class="pick">Colour by <select value=${way} onChange=${(event) => change({ way: event.target.value })}>${Object.entries(WAYS).map(([name, says]) => html`<option value=${name}>${says}</option>`)}</select></label>
      ${way !== "none" && way !== "version" && html`<span class="legend"><span>${scale[0]}</span><span class="scale">${Array.from({ length: 11 }, (_, each) => html`<i class=${`s${each}`}></i>`)}</span><span>${scale[1]}</span></span>`}
      <span class="token given">given</span><span class="token sampled s0">sampled</span>
      <span class="soft">${data.tokenizer ? `texts by ${data.tokenizer}` : "ids only: no tokenizer is known"}</span></div>
    <p class="tip token-tip" aria-live="off">${tip || "Point at a token for its id."}</p>
    ${data.sequences.map((sequence, which) => html`<${Sequence} key=${which} sequence=${sequence} lane=${lanes?.[which]} which=${which} total=${data.sequences.length} way=${way} onHover=${setTip} />`)}
  </div>`;
}
