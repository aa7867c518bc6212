// The words that two texts share, and those that only one has. Pure functions.
//
//   diff("a b c", "a c")  ->  [["same", "a "], ["left", "b "], ["same", "c"]]

const MOST = 2500;

function words(text) {
  return text.match(/\s+|[^\s\w]|\w+/g) || [];
}

// Finds the longest common sequence of words with a table; the common beginning and end are removed first.
export function diff(left, right) {
  const [a, b] = [words(left), words(right)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const [x, y] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  const parts = [["same", a.slice(0, start).join("")], ...middle(x, y), ["same", a.slice(a.length - end).join("")]];
  return join(parts.filter(([, text]) => text));
}

function middle(x, y) {
  if (x.length > MOST || y.length > MOST || !x.length || !y.length) return [["left", x.join("")], ["right", y.join("")]];
  const wide = y.length + 1;
  const table = new Uint16Array((x.length + 1) * wide);
  for (let i = x.length - 1; i >= 0; i -= 1)
    for (let j = y.length - 1; j >= 0; j -= 1)
      table[i * wide + j] = x[i] === y[j] ? table[(i + 1) * wide + j + 1] + 1 : Math.max(table[(i + 1) * wide + j], table[i * wide + j + 1]);
  const parts = [];
  let [i, j] = [0, 0];
  while (i < x.length && j < y.length) {
    if (x[i] === y[j]) parts.push(["same", x[(j += 1, i++)]]);
    else if (table[(i + 1) * wide + j] >= table[i * wide + j + 1]) parts.push(["left", x[i++]]);
    else parts.push(["right", y[j++]]);
  }
  return [...parts, ["left", x.slice(i).join("")], ["right", y.slice(j).join("")]];
}

function join(parts) {
  const joined = [];
  for (const [kind, text] of parts) {
    const last = joined[joined.length - 1];
    if (last?.[0] === kind) last[1] += text;
    else joined.push([kind, text]);
  }
  return joined;
}
