// The answer to a call, for as long as a view shows it.
//
//   const { data, error } = useAnswer("run", { run: 3 }, version);
//
// A new version of the same call is requested while the old answer stays on the screen.
import { useEffect, useState } from "./vendor/hooks.js";
import { ask } from "./api.js";
import { html } from "./html.js";

const kept = new Map();
const MOST = 60;
export const AGAIN = 400;

// Whether the server has read only a part of the run yet: then the answer is soon requested again.
export function isPart(answer) {
  return answer?.read != null && answer.read < 1;
}

function keep(key, data) {
  kept.delete(key);
  kept.set(key, data);
  if (kept.size > MOST) kept.delete(kept.keys().next().value);
}

export function forget() {
  kept.clear();
}

export function useAnswer(name, args, version = 0) {
  const call = args && name + JSON.stringify(args);
  const key = `${call}@${version}`;
  const [state, set] = useState({});
  const [times, again] = useState(0);
  useEffect(() => {
    if (!call) return undefined;
    if (kept.has(key)) {
      set({ call, data: kept.get(key) });
      return undefined;
    }
    const stop = new AbortController();
    let timer = 0;
    (async () => ask(name, args, stop.signal))().then(
      (data) => {
        if (isPart(data)) timer = setTimeout(() => again(times + 1), AGAIN);
        else keep(key, data);
        set({ call, data });
      },
      (error) => error.name !== "AbortError" && set((before) => ({ call, error, data: before.call === call ? before.data : undefined })),
    );
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [key, times]);
  if (state.call === call) return state;
  return kept.has(key) ? { call, data: kept.get(key) } : { waits: true };
}

// Shown in place of an answer: a sign that it is awaited, or the error.
export function Instead({ error }) {
  if (!error) return html`<p class="waits" role="status">Loading…</p>`;
  return html`<${Trouble} error=${error} />`;
}

export function Trouble({ error }) {
  return html`<div class="trouble" role="alert">
    <strong>${error.message}</strong>${error.remedy && html`<span>${error.remedy}</span>`}
  </div>`;
}
