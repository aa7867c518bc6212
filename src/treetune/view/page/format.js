// Formats numbers, durations and texts for people.

const NONE = "–";
const whole = new Intl.NumberFormat("en");

export function count(value) {
  return value == null ? NONE : whole.format(value);
}

// A reward or another figure: three decimals, without zeros at the end.
export function number(value, places = 3) {
  if (value == null || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(1);
  const text = value.toFixed(size >= 100 ? 1 : places);
  return (text.includes(".") ? text.replace(/\.?0+$/, "") : text).replace(/^-/, "−").replace(/^−0$/, "0");
}

// A cell has room for three characters: 1, .5, −1, .33
export function tiny(value) {
  const text = number(value, Math.abs(value) < 1 ? 2 : Math.abs(value) < 10 ? 1 : 0);
  return text.replace(/^(−?)0\./, "$1.");
}

export function signed(value, places = 3) {
  return value == null ? NONE : (value > 0 ? "+" : "") + number(value, places);
}

export function percent(value) {
  return value == null ? NONE : `${number(100 * value, 1)} %`;
}

// Thousands and millions of tokens: 12.3k
export function amount(value) {
  if (value == null) return NONE;
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (value >= size) return number(value / (letter === "k" ? 1e3 : size), 1) + letter;
  return count(Math.round(value));
}

export function seconds(value) {
  if (value == null) return NONE;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${number(value, 1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function date(epoch) {
  if (epoch == null) return NONE;
  const when = new Date(epoch * 1000);
  const today = new Date().toDateString() === when.toDateString();
  const time = when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  return today ? time : `${when.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}

export function plural(number, word, words = `${word}s`) {
  return `${count(number)} ${number === 1 ? word : words}`;
}

const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff]/g;

// Shows control characters, and those that change the direction of a text, so that a text looks as it is.
export function visible(text) {
  return String(text).replace(/\r\n/g, "\n").replace(HIDDEN, (letter) => {
    const code = letter.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// Any value as text: a string unchanged, anything else as JSON.
export function plain(value, indent = 2) {
  if (typeof value === "string") return visible(value);
  return value === undefined ? "" : visible(JSON.stringify(value, null, indent));
}
