// The answers in an exported file, by call, in place of a server (`treetune view RUN --export report.html`).

const NEEDS = "This file contains only the exported rollouts.";
const REMEDY = "Open the run with `treetune view` for this.";
let answers;

function kept() {
  if (answers === undefined) {
    const element = document.getElementById("kept");
    answers = element ? JSON.parse(element.textContent) : null;
  }
  return answers;
}

export function isKept() {
  return kept() !== null;
}

// Describes what was left out, if anything was.
export function keptNote() {
  return kept()?.note || null;
}

const KEYS = {
  run: (args) => args.run,
  suspicious: (args) => args.run,
  groups: (args) => args.run,
  rollouts: (args) => args.run,
  rollout: (args) => `${args.run}/${args.at ?? args.name}`,
  tokens: (args) => `${args.run}/${args.at}`,
  compare: (args) => args.runs.join(","),
  pair: (args) => `${args.runs.join(",")}/${args.uid}/${args.occurrence}`,
};

export function answerKept(name, args) {
  const all = kept();
  if (name === "runs") return all.runs;
  if (name === "words") return all.words || { numbers: [], texts: [], words: [], metrics: {} };
  const found = all[name]?.[KEYS[name]?.(args)] ?? (name === "compare" ? pickCompared(all, args.runs) : undefined);
  if (found === undefined) throw refuse();
  if (name === "groups") return part(pickGroups(found, args.query), args, GROUPS);
  if (name === "rollouts") return part(pickRollouts(found, all.groups?.[args.run], args.query), args, {});
  if (name === "compare" && args.query) throw refuse("A query needs the run itself.");
  return found;
}

const FLAGS = { mixed: "mixed", all0: "all0", all1: "all1", allfailed: "failed" };
const WORDS = { failed: (one) => one.reward == null, scored: (one) => one.reward != null, truncated: (one) => one.outcome === "truncated" };

// Only keywords work in queries here, because they need only the shown data: the flags of groups, and how a rollout ended.
function wordsOf(query) {
  const words = (query || "").split(/[\s&]+/).filter(Boolean);
  if (!words.every((word) => FLAGS[word] || WORDS[word])) throw refuse("Here a query may only use the words mixed, all0, all1, allfailed, failed, scored, truncated.");
  return words;
}

// All runs were compared with the first; two of them are among these comparisons.
function pickCompared(all, [first, ...others]) {
  const known = Object.values(all.compare || {}).flat().filter((each) => each.before === first && others.includes(each.after));
  return known.length ? known : undefined;
}

function pickGroups(answer, query) {
  const words = wordsOf(query);
  const fits = (one) => words.every((word) => !WORDS[word] || WORDS[word](one));
  const rows = answer.rows
    .filter((row) => words.every((word) => !FLAGS[word] || row.flag === FLAGS[word]))
    .map((row) => ({ ...row, cells: row.cells.map((cell) => ({ ...cell, fits: fits(cell) })) }))
    .filter((row) => row.cells.some((cell) => cell.fits));
  const matching = rows.reduce((sum, row) => sum + row.cells.filter((cell) => cell.fits).length, 0);
  return { ...answer, rows, total: rows.length, matching_rollouts: matching };
}

function pickRollouts(answer, groups, query) {
  const fit = new Set(pickGroups(groups || { rows: [] }, query).rows.flatMap((row) => row.cells.filter((cell) => cell.fits).map((cell) => cell.at)));
  const rows = query ? answer.rows.filter((row) => fit.has(row.at)) : answer.rows;
  return { ...answer, rows, total: rows.length };
}

function refuse(message = NEEDS) {
  return Object.assign(new Error(message), { remedy: REMEDY });
}

const GROUPS = {
  rollouts: (row) => row.cells.length,
  failed: (row) => row.cells.filter((cell) => cell.reward == null).length,
};

function part(answer, { sort, descending, start = 0, count = 100 }, known) {
  const value = known[sort] || ((row) => row[sort] ?? row.metrics?.[sort]);
  const sign = descending ? -1 : 1;
  const rows = sort ? [...answer.rows].sort((a, b) => order(value(a), value(b), sign)) : answer.rows;
  return { ...answer, rows: rows.slice(start, start + count) };
}

// Entries without a value come last, in either direction.
function order(one, other, sign) {
  if (one == null || other == null) return (one == null) - (other == null);
  return sign * (typeof one === "string" ? one.localeCompare(other) : one - other);
}
