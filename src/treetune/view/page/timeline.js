// The timeline of a run: each rollout as a bar from its beginning to its end, next to those that ran at the same time.
// Failures are marked, retries dotted; a click opens one.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { go } from "./address.js";
import { number, seconds } from "./format.js";
import { step } from "./reward.js";
import { colour } from "./theme.js";

const MARGIN = 18;

// Places rollouts on as few lanes as possible without overlap, each on the first free one.
export function lanes(rollouts) {
  const ends = [];
  const placed = [...rollouts].sort((one, other) => one.began - other.began).map((rollout) => {
    let lane = ends.findIndex((end) => end <= rollout.began);
    if (lane < 0) lane = ends.length;
    ends[lane] = rollout.began + rollout.seconds;
    return { ...rollout, lane };
  });
  return { placed, count: ends.length, end: Math.max(0, ...ends) };
}

function paint(canvas, { placed, count, end }, span, chosen) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const inks = Object.fromEntries(Array.from({ length: 11 }, (_, at) => [`r${at}`, colour(`reward${at}`)]));
  const [ink, soft, line] = ["ink", "soft", "line"].map(colour);
  const lane = (height - MARGIN) / Math.max(1, count);
  const thick = Math.max(1, Math.min(16, lane - (lane > 4 ? 1 : 0)));
  pen.font = "11px system-ui, sans-serif";
  for (let tick = 0; tick <= 6; tick += 1) {
    const x = (tick / 6) * (width - 40);
    pen.fillStyle = line;
    pen.fillRect(x, 0, 1, height - MARGIN);
    pen.fillStyle = soft;
    pen.textAlign = tick === 6 ? "right" : "left";
    pen.fillText(seconds((end * tick) / 6), tick === 6 ? width : x + 3, height - 5);
  }
  for (const each of placed) {
    const x = (each.began / end) * (width - 40);
    const wide = Math.max(1.5, (each.seconds / end) * (width - 40));
    const y = each.lane * lane;
    pen.fillStyle = each.reward == null ? ink : inks[step(each.reward, span)];
    pen.fillRect(x, y, wide, thick);
    pen.fillStyle = each.reward == null ? line : ink;
    for (let dot = 0; dot < Math.min(3, each.retries || 0); dot += 1) pen.fillRect(x + 2 + 4 * dot, y + thick / 2 - 1, 2, 2);
    if (each.at === chosen) {
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      pen.strokeRect(x - 1, y - 1, wide + 2, thick + 2);
    }
  }
}

export function Timeline({ run, rollouts, span }) {
  const canvas = useRef(null);
  const [found, set] = useState(null);
  const placed = lanes(rollouts);
  useEffect(() => {
    const element = canvas.current;
    const draw = () => element.clientWidth && paint(element, placed, span, found?.at);
    draw();
    const observer = new ResizeObserver(draw);
    observer.observe(element);
    addEventListener("theme", draw);
    return () => {
      observer.disconnect();
      removeEventListener("theme", draw);
    };
  }, [rollouts, found?.at]);
  const look = (event) => {
    const { clientWidth: width, clientHeight: height } = canvas.current;
    const time = (event.offsetX / (width - 40)) * placed.end;
    const lane = Math.floor(event.offsetY / ((height - MARGIN) / Math.max(1, placed.count)));
    const slack = (placed.end / (width - 40)) * 3;
    return placed.placed.find((each) => each.lane === lane && time >= each.began - slack && time <= each.began + each.seconds + slack) || null;
  };
  const open = (event) => {
    const hit = look(event);
    if (hit) go(["run", run, "at", hit.at]);
  };
  const failed = rollouts.filter((each) => each.reward == null).length;
  const retried = rollouts.reduce((sum, each) => sum + (each.retries || 0), 0);
  return html`<figure class="chart timeline">
    <figcaption>Timeline <small>${placed.count} at a time at most · dots: retries (${retried}) · <i class="swatch"></i> failed (${failed})</small></figcaption>
    <canvas ref=${canvas} role="img" aria-label=${`${rollouts.length} rollouts over ${seconds(placed.end)}, ${failed} failed, ${retried} retries`}
      onMouseMove=${(event) => set(look(event))} onMouseLeave=${() => set(null)} onClick=${open} class=${found ? "on" : ""}></canvas>
    <p class="tip">${found ? `began after ${seconds(found.began)}, took ${seconds(found.seconds)} (policy ${seconds(found.policy)}, environment ${seconds(found.environment)}) · ${found.outcome.replace("_", " ")} · ${found.reward == null ? "no reward" : `reward ${number(found.reward)}`}${found.retries ? ` · ${found.retries} retries` : ""}` : "\u00a0"}</p>
  </figure>`;
}
