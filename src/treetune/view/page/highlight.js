// Marks the words of a query in the texts that it found.
import { html } from "./html.js";
import { read } from "./address.js";

const SAID = /(?<![=~<>]\s*)"((?:[^"\\]|\\.)+)"/g;
const MOST = 2000;

export function wordsOf(query) {
  return [...(query || "").matchAll(SAID)].map(([, text]) => text.replace(/\\(.)/g, "$1")).filter((text) => text.length > 1);
}

// The text as it is, or in parts with the matches marked.
export function highlight(text, query = read().params.q) {
  const words = wordsOf(query);
  if (!words.length) return text;
  const found = new RegExp(`(${words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "i");
  const parts = text.split(found);
  if (parts.length === 1 || parts.length > MOST) return text;
  return parts.map((part, at) => (at % 2 ? html`<mark class="hit">${part}</mark>` : part));
}
