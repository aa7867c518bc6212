// The list of runs, and the changes of runs that are still being written: requested every two seconds while the page is visible.
//
//   const { answer } = useRuns();          versionOf(answer.runs[3]) changes as more of run 3 is known
import { useEffect, useState } from "./vendor/hooks.js";
import { ask } from "./api.js";
import { isKept } from "./kept.js";

const EVERY = 2000;
const SOON = 300; // while a run is being read
let state = { answer: null, error: null, lost: false };
const listeners = new Set();
const touched = new Map();
let before = [];

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
    // A recent change may have been answered only in part, so it is requested once more.
    const ids = new Set([...changed, ...before]);
    before = changed;
    ids.forEach((id) => touched.set(id, (touched.get(id) || 0) + 1));
    if (ids.size || fresh) await refresh();
    else if (state.lost) set({ lost: false });
  } catch {
    set({ lost: true });
  }
}

export function follow() {
  refresh();
  if (isKept()) return;
  const reads = () => state.answer?.runs.some((run) => run.pending || run.read < 1);
  const again = async () => {
    if (!document.hidden) await (state.answer && !reads() ? look() : refresh());
    setTimeout(again, reads() ? SOON : EVERY);
  };
  setTimeout(again, SOON);
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

export function versionOf(run) {
  return run ? `${run.rollouts} ${run.read ?? 1} ${touched.get(run.id) || 0}` : "";
}

export function useRun(id) {
  return useRuns().answer?.runs.find((run) => run.id === Number(id));
}
