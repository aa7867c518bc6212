// Keyboard shortcuts. A view names its keys and what they do; `?` shows all that are active.
//
//   useKeys({ t: ["tokens", () => go(...)] });
import { useEffect, useRef } from "./vendor/hooks.js";

const layers = [];

export function useKeys(keys) {
  const layer = useRef({});
  layer.current.keys = keys;
  useEffect(() => {
    layers.push(layer.current);
    return () => layers.splice(layers.indexOf(layer.current), 1);
  }, []);
}

// All keys by name, those of the innermost view last.
export function knownKeys() {
  const known = new Map();
  for (const { keys } of layers) for (const [key, [says]] of Object.entries(keys)) if (says) known.set(key, says);
  return known;
}

function writes(element) {
  return element?.closest?.("input:not([type=checkbox]), textarea, select, [contenteditable]");
}

export function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (writes(event.target) && event.key !== "Escape") return;
    if (document.querySelector("dialog[open]")) return;
    for (let at = layers.length - 1; at >= 0; at -= 1) {
      const found = layers[at].keys[event.key];
      if (found) {
        event.preventDefault();
        found[1](event);
        return;
      }
    }
  });
}

let voice;

// Announces a text to screen readers.
export function announce(text) {
  voice ||= document.getElementById("voice");
  if (voice) voice.textContent = text;
}
