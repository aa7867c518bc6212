// Completes a query: names, keywords, and the values of a text. Pure functions.
//
//   complete("source=gs", 9, words)   ->   { from: 7, options: [{ text: "gsm8k", says: "a source" }] }

const SAYS = {
  reward: "its reward", turns: "how many", tokens: "sampled ones", prompt_tokens: "given ones", seconds: "how long it took",
  task: "index of its task", rollout: "number in its group", step: "of the trainer", source: "the source of the task",
  outcome: "how it ended", failure: "its type and line", answer: "what it answered", uid: "of its task", mark: "your mark",
  failed: "has no reward", scored: "has a reward", solved: "counts as solved", truncated: "was cut off",
  mixed: "groups with different rewards", all0: "groups that never earn a reward", all1: "groups that always earn the reward",
  allfailed: "groups that failed", retries: "calls made again", attempt: "given out before", success: "as the environment reports it",
};
export const OUTCOMES = ["completed", "truncated", "timeout", "environment_error", "policy_error", "cancelled", "stale"];
export const MARKS = ["good", "bad", "look"];

function valuesOf(name, words) {
  if (name === "source") return words.sources;
  if (name === "outcome") return OUTCOMES;
  return name === "mark" ? MARKS : [];
}

// A value with spaces or operators is quoted.
function quote(text) {
  return /^[^\s()&|"]+$/.test(text) ? text : `"${text.replace(/[\\"]/g, "\\$&")}"`;
}

export function complete(text, caret, words) {
  const before = text.slice(0, caret);
  const value = /([A-Za-z_][\w.@/-]*)\s*(?:==?|!=|~)\s*"?([^\s()&|"]*)$/.exec(before);
  if (value) {
    const typed = value[2].toLowerCase();
    const found = valuesOf(value[1], words).filter((each) => each.toLowerCase().includes(typed));
    return { from: caret - value[2].length, options: found.map((each) => ({ text: quote(each), says: value[1] })) };
  }
  const typed = /[A-Za-z_][\w.@/-]*$/.exec(before)?.[0] || "";
  if (!typed && /["\w]$/.test(before)) return { from: caret, options: [] };
  const names = [
    ...words.words.map((name) => ({ text: name, says: SAYS[name] || "" })),
    ...words.numbers.map((name) => ({ text: name, sign: "<", says: SAYS[name] || "" })),
    ...words.texts.map((name) => ({ text: name, sign: "=", says: SAYS[name] || "" })),
    ...words.metrics.map((name) => ({ text: name, sign: ">", says: "metric" })),
  ];
  const found = names.filter(({ text: name }) => name.toLowerCase().startsWith(typed.toLowerCase()) && name !== typed);
  return { from: caret - typed.length, options: found };
}

// The query with a word added, or removed if it was there.
export function toggle(query, word) {
  const parts = query.split(/\s+/).filter(Boolean);
  const without = parts.filter((part) => part !== word);
  return (without.length < parts.length ? without : [...parts, word]).join(" ");
}

export function hasWord(query, word) {
  return query.split(/\s+/).includes(word);
}
