// What an exported file holds in place of a server: the answers, by call (`treetune view RUN --export report.html`).

const NEEDS = "This file holds only what was exported.";
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

// What was left out, where something was.
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
  const found = all[name]?.[KEYS[name]?.(args)];
  if (found === undefined) throw refuse();
  if (args.query && ["groups", "rollouts", "compare"].includes(name)) throw refuse("A query needs the run itself.");
  return name === "groups" || name === "rollouts" ? part(found, args, name === "groups" ? GROUPS : {}) : found;
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

// What has no value comes last, whichever way it is sorted.
function order(one, other, sign) {
  if (one == null || other == null) return (one == null) - (other == null);
  return sign * (typeof one === "string" ? one.localeCompare(other) : one - other);
}
