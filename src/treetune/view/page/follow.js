// The list of runs, and what is new in those that are still being written: asked every two seconds while one looks.
//
//   const { answer } = useRuns();          answer.runs[3].rollouts is the version of what is known of run 3
import { useEffect, useState } from "./vendor/hooks.js";
import { ask } from "./api.js";
import { isKept } from "./kept.js";

const EVERY = 2000;
let state = { answer: null, error: null, lost: false };
const listeners = new Set();

function set(change) {
  state = { ...state, ...change };
  listeners.forEach((listener) => listener(state));
}

export async function refresh() {
  try {
    set({ answer: await ask("runs"), error: null, lost: false });
  } catch (error) {
    set(state.answer ? { lost: true } : { error });
  }
}

async function look() {
  const known = Object.fromEntries(state.answer.runs.map((run) => [run.id, run.rollouts]));
  try {
    const { changed, new_runs: fresh } = await ask("changes", { runs: known });
    if (changed.length || fresh) await refresh();
    else if (state.lost) set({ lost: false });
  } catch {
    set({ lost: true });
  }
}

export function follow() {
  refresh();
  if (isKept()) return;
  const again = async () => {
    if (!document.hidden) await (state.answer ? look() : refresh());
    setTimeout(again, EVERY);
  };
  setTimeout(again, EVERY);
}

export function useRuns() {
  const [now, show] = useState(state);
  useEffect(() => {
    show(state);
    listeners.add(show);
    return () => listeners.delete(show);
  }, []);
  return now;
}

export function useRun(id) {
  return useRuns().answer?.runs.find((run) => run.id === Number(id));
}
