// A sequence of tokens in one line: given tokens are grey, and sampled ones are darker the less certain the policy was.
// A click scrolls there.
import { useEffect, useRef } from "./vendor/hooks.js";
import { html } from "./html.js";
import { colour } from "./theme.js";

const SURPRISE = 3;

// For each column of the picture the share of sampled tokens, and their mean surprise.
export function columns({ ids, mask, logprobs }, wide) {
  const found = Array.from({ length: wide }, () => ({ sampled: 0, tokens: 0, surprise: 0 }));
  ids.forEach((_, at) => {
    const column = found[Math.min(wide - 1, Math.floor((at / ids.length) * wide))];
    column.tokens += 1;
    if (!mask[at]) return;
    column.sampled += 1;
    column.surprise -= logprobs[at] || 0;
  });
  return found;
}

function paint(canvas, sequence) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const ratio = devicePixelRatio || 1;
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const [given, sampled, unsure] = ["faint", "accent", "reward0"].map(colour);
  const wide = Math.max(1, Math.min(width, sequence.ids.length));
  const each = width / wide;
  columns(sequence, wide).forEach((column, at) => {
    pen.fillStyle = given;
    pen.globalAlpha = 1;
    pen.fillRect(at * each, height - 5, each + 0.5, 5);
    if (!column.sampled) return;
    pen.fillStyle = sampled;
    pen.fillRect(at * each, height - 5, each + 0.5, 5 * (column.sampled / column.tokens));
    const share = Math.min(1, column.surprise / column.sampled / SURPRISE);
    pen.fillStyle = unsure;
    pen.globalAlpha = 0.35 + 0.65 * share;
    pen.fillRect(at * each, (height - 6) * (1 - share), Math.max(1, each - 0.3), (height - 6) * share);
  });
}

export function Minimap({ sequence, onPick }) {
  const canvas = useRef(null);
  useEffect(() => {
    const element = canvas.current;
    const draw = () => element.clientWidth && paint(element, sequence);
    draw();
    const observer = new ResizeObserver(draw);
    observer.observe(element);
    addEventListener("theme", draw);
    return () => {
      observer.disconnect();
      removeEventListener("theme", draw);
    };
  }, [sequence]);
  const pick = (event) => onPick(Math.floor((event.offsetX / canvas.current.clientWidth) * sequence.ids.length));
  return html`<canvas class="minimap" ref=${canvas} role="img" aria-label="Where the policy was unsure, over the sequence" title="How unsure the policy was; click to go there" onClick=${pick}></canvas>`;
}
