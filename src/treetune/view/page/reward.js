// Rewards as colours: eleven steps from the lowest (orange) over the middle (grey) to the highest (blue), distinct
// for people who cannot tell red from green, too. A cell also has its number; a failed rollout has no reward, and is
// hatched.
import { html } from "./html.js";
import { number, signed, tiny } from "./format.js";

const SHORT = { environment_error: "env", policy_error: "pol", timeout: "time", cancelled: "stop", stale: "old" };

// The range of rewards of a run, from its histogram: the usual range if it fits.
export function spanOf(run) {
  const edges = run?.histogram?.edges;
  if (!edges?.length) return [0, 1];
  const [low, high] = [edges[0], edges[edges.length - 1]];
  if (low >= 0 && high <= 1) return [0, 1];
  if (low >= -1 && high <= 1) return [-1, 1];
  return [low, high];
}

// The step of a value: r0 to r10.
export function step(value, [low, high]) {
  const share = high > low ? (value - low) / (high - low) : 0.5;
  return `r${Math.round(10 * Math.min(1, Math.max(0, share)))}`;
}

export function cellClass({ reward, outcome }, span, value = reward) {
  if (value == null) return `cell fails ${outcome === "stale" || outcome === "cancelled" ? "soft" : ""}`;
  return `cell ${step(value, span)}${outcome === "truncated" ? " cut" : ""}${outcome === "timeout" ? " cut" : ""}`;
}

export function cellText({ reward, outcome }, value = reward) {
  return value == null ? (SHORT[outcome] ? "×" : "–") : tiny(value);
}

export function cellTitle(cell) {
  const parts = [`rollout ${cell.rollout}`, cell.reward == null ? "no reward" : `reward ${number(cell.reward)}`];
  if (cell.advantage != null) parts.push(`advantage ${signed(cell.advantage)}`);
  parts.push(cell.outcome?.replace("_", " "));
  if (cell.tag) parts.push(cell.tag);
  return parts.filter(Boolean).join(" · ");
}

export function Reward({ value, span = [0, 1], outcome }) {
  const what = { reward: value, outcome };
  return html`<span class=${`${cellClass(what, span)} lone`}>${value == null ? "×" : number(value)}</span>`;
}

export function Outcome({ name }) {
  const kind = name === "completed" ? "" : ["truncated", "timeout", "stale", "cancelled"].includes(name) ? "warn" : "bad";
  return html`<span class=${`badge ${kind}`}>${name?.replace("_", " ")}</span>`;
}

const FLAGS = { all0: "all 0", all1: "all 1", mixed: "mixed", failed: "all failed" };

export function Flag({ name }) {
  return name ? html`<span class=${`flag ${name}`}>${FLAGS[name] || name}</span>` : null;
}

export function Legend({ span, of = "reward" }) {
  const steps = Array.from({ length: 11 }, (_, at) => html`<i class=${`r${at}`}></i>`);
  return html`<span class="legend" role="img" aria-label=${`${of} from ${number(span[0])} (orange) to ${number(span[1])} (blue); hatched: failed`}>
    <span>${number(span[0])}</span><span class="scale">${steps}</span><span>${number(span[1])}</span>
    <i class="cell fails sample"></i><span>failed</span>
  </span>`;
}
