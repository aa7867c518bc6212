// The rows of a long answer, requested in parts as they become visible.
//
//   const rows = useRows("groups", { run, query, sort }, version);
//   rows.total, rows.at(17), rows.want(first, last), rows.error
import { useCallback, useEffect, useRef, useState } from "./vendor/hooks.js";
import { AGAIN, isPart } from "./answer.js";
import { ask } from "./api.js";

const PAGE = 100;
const AT_ONCE = 2;

function store(name, args, key) {
  return { name, args, key, pages: new Map(), asked: new Set(), total: null, rest: {} };
}

export function useRows(name, args, version = 0) {
  const key = name + JSON.stringify(args);
  const shown = useRef(null);
  const [, draw] = useState(0);
  const [error, setError] = useState(null);
  const range = useRef([0, 40]);
  const [times, again] = useState(0);

  const load = useCallback(async (from, page) => {
    from.asked.add(page);
    try {
      const answer = await ask(from.name, { ...from.args, start: page * PAGE, count: PAGE });
      from.pages.set(page, answer.rows);
      from.total = answer.total;
      from.rest = answer;
      if (from.dropped) return;
      if (isPart(answer)) from.timer ||= setTimeout(() => again((before) => before + 1), AGAIN);
      shown.current = from;
      setError(null);
      draw((times) => times + 1);
    } catch (problem) {
      from.asked.delete(page);
      from.failed = true;
      if (!from.dropped) setError(problem);
    }
    if (!from.dropped && !from.failed) fill(from);
  }, []);

  // Visible pages come first, then the next ones; few at a time, so that pages that were scrolled past do not delay the others.
  const fill = useCallback((from) => {
    const [first, last] = range.current.map((row) => Math.floor(row / PAGE));
    for (let page = first; page <= last + 1; page += 1) {
      if (from.asked.size - from.pages.size >= AT_ONCE) return;
      if (page * PAGE < from.total && !from.asked.has(page)) load(from, page);
    }
  }, []);

  const next = useRef(null);
  useEffect(() => {
    if (next.current) next.current.dropped = true;
    const fresh = store(name, args, key);
    const first = next.current?.key === key ? range.current[0] : 0;
    next.current = fresh;
    // The rows on the screen stay until the first rows of the new answer arrive.
    load(fresh, Math.floor(first / PAGE));
    return () => {
      fresh.dropped = true;
      clearTimeout(fresh.timer);
    };
  }, [key, version, times]);

  const want = useCallback((first, last) => {
    range.current = [first, last];
    if (next.current?.total != null) fill(next.current);
  }, []);

  const now = shown.current;
  return {
    total: now ? now.total : null,
    rest: now ? now.rest : {},
    stale: now?.key !== key,
    at: (index) => now?.pages.get(Math.floor(index / PAGE))?.[index % PAGE],
    want,
    error,
  };
}
