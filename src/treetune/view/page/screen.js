// The width of the screen, and small functions that every view uses.
import { useEffect, useState } from "./vendor/hooks.js";
import { announce } from "./keys.js";

const narrow = matchMedia("(max-width: 760px)");

export function useNarrow() {
  const [is, set] = useState(narrow.matches);
  useEffect(() => {
    const changed = () => set(narrow.matches);
    narrow.addEventListener("change", changed);
    return () => narrow.removeEventListener("change", changed);
  }, []);
  return is;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without a secure context, only the old method works.
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "hidden-text";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied");
}
