// Dark or light: the system's preference, or the user's choice here.
import { useEffect, useState } from "./vendor/hooks.js";
import { html } from "./html.js";

const KEPT = "treetune-theme";
const SIGN = { system: "◐", light: "☀", dark: "☾" };

function kept() {
  try {
    return localStorage.getItem(KEPT) || "system";
  } catch {
    return "system";
  }
}

export function applyTheme(theme = kept()) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(KEPT, theme);
  } catch {
    // Without storage, the choice lasts until the page is closed.
  }
  dispatchEvent(new Event("theme"));
}

export function nextTheme() {
  const theme = document.documentElement.dataset.theme;
  const dark = theme === "system" ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
  applyTheme(dark ? "light" : "dark");
}

export function ThemeSwitch() {
  const [theme, set] = useState(kept());
  useEffect(() => {
    const follow = () => set(document.documentElement.dataset.theme);
    addEventListener("theme", follow); // a key changes it too
    return () => removeEventListener("theme", follow);
  }, []);
  return html`<button class="icon" onClick=${nextTheme} title=${`Colours: ${theme}`} aria-label=${`Colours: ${theme}. Change them`}>
    ${SIGN[theme]}
  </button>`;
}

// Canvases need computed colours.
export function colour(name) {
  const probe = document.createElement("span");
  probe.className = "probe";
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
