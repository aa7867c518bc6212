// The rows of a long answer, asked for in windows as they come into sight.
//
//   const rows = useRows("groups", { run, query, sort }, version);
//   rows.total, rows.at(17), rows.want(first, last), rows.error
import { useCallback, useEffect, useRef, useState } from "./vendor/hooks.js";
import { ask } from "./api.js";

const PAGE = 100;

function store(name, args, key) {
  return { name, args, key, pages: new Map(), asked: new Set(), total: null, rest: {} };
}

export function useRows(name, args, version = 0) {
  const key = name + JSON.stringify(args);
  const shown = useRef(null);
  const [, draw] = useState(0);
  const [error, setError] = useState(null);
  const range = useRef([0, 40]);

  const load = useCallback(async (from, page) => {
    if (from.asked.has(page)) return;
    from.asked.add(page);
    try {
      const answer = await ask(from.name, { ...from.args, start: page * PAGE, count: PAGE });
      from.pages.set(page, answer.rows);
      from.total = answer.total;
      from.rest = answer;
      if (from.dropped) return;
      shown.current = from;
      setError(null);
      draw((times) => times + 1);
    } catch (problem) {
      from.asked.delete(page);
      if (!from.dropped) setError(problem);
    }
  }, []);

  const next = useRef(null);
  useEffect(() => {
    if (next.current) next.current.dropped = true;
    const fresh = store(name, args, key);
    const first = next.current?.key === key ? range.current[0] : 0;
    next.current = fresh;
    // What was on the screen stays there until the first rows of the new answer have come.
    load(fresh, Math.floor(first / PAGE));
    return () => {
      fresh.dropped = true;
    };
  }, [key, version]);

  const want = useCallback((first, last) => {
    range.current = [first, last];
    const from = next.current;
    if (!from || from.total === null) return;
    for (let page = Math.floor(first / PAGE); page * PAGE < Math.min(last, from.total); page += 1) load(from, page);
  }, []);

  const now = shown.current;
  useEffect(() => {
    if (now) want(...range.current);
  }, [now]);
  return {
    total: now ? now.total : null,
    rest: now ? now.rest : {},
    stale: now?.key !== key,
    at: (index) => now?.pages.get(Math.floor(index / PAGE))?.[index % PAGE],
    want,
    error,
  };
}
