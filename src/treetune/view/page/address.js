// The address of the view is in the fragment, so a copied link shows the same view.
//
//   #/run/3/groups?q=reward%3C0.5&sort=variance      go(["run", 3, "groups"], { q: "reward<0.5", sort: "variance" })
import { useEffect, useState } from "./vendor/hooks.js";

export function read(hash = location.hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  const params = Object.fromEntries(new URLSearchParams(query || ""));
  return { path: path.split("/").filter(Boolean).map(decode), params, hash };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function link(path, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value != null && value !== "" && value !== false);
  const query = new URLSearchParams(given.map(([name, value]) => [name, value === true ? "1" : String(value)]));
  const text = query.toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

// `replace` adds no step to the history: use it for changes of the same view.
export function go(path, params = {}, replace = false) {
  const hash = link(path, params);
  if (hash === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", hash);
  dispatchEvent(new Event("hashchange"));
}

// Changes some parameters of the address, in place.
export function change(params, replace = true) {
  const now = read();
  go(now.path, { ...now.params, ...params }, replace);
}

export function useAddress() {
  const [address, set] = useState(() => read());
  useEffect(() => {
    const moved = () => set((before) => (before.hash === location.hash ? before : read()));
    const names = ["hashchange", "popstate"];
    names.forEach((name) => addEventListener(name, moved));
    return () => names.forEach((name) => removeEventListener(name, moved));
  }, []);
  return address;
}
