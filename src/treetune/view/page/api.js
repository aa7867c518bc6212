// Calls the server: `await ask("groups", { run: 0, start: 0, count: 100 })`.
//
// The token of a server that is open to others comes in the fragment of the address (#token=...). It is kept for this
// tab and taken out of the address, so that a copied link does not hold it.
import { answerKept, isKept } from "./kept.js";

const KEPT = "treetune-token";

export class Refused extends Error {
  constructor(message, remedy = null, status = 0) {
    super(message);
    this.remedy = remedy;
    this.status = status;
  }
}

export function takeToken() {
  const found = /^#token=([^/&]+)(\/.*)?$/.exec(location.hash);
  if (!found) return;
  setToken(decodeURIComponent(found[1]));
  history.replaceState(null, "", `#${found[2] || "/"}`);
}

export function setToken(token) {
  try {
    sessionStorage.setItem(KEPT, token);
  } catch {
    // A file from disk may have no storage, and needs no token.
  }
}

async function post(name, args, signal) {
  const headers = { "Content-Type": "application/json" };
  const token = sessionStorage.getItem(KEPT);
  if (token) headers.Authorization = `Bearer ${token}`;
  let answer;
  try {
    answer = await fetch(`/api/${name}`, { method: "POST", headers, body: JSON.stringify(args), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer.", "Is `treetune view` still running?");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Refused(said.error || `The server answered ${answer.status}.`, said.remedy, answer.status);
}

export async function ask(name, args = {}, signal = undefined) {
  if (isKept()) return answerKept(name, args);
  return (await post(name, args, signal)).json();
}

// Saves the bytes of an answer as a file.
export async function save(name, args, file) {
  if (isKept()) return answerKept(name, args);
  const bytes = await (await post(name, args)).blob();
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(bytes);
  anchor.download = file;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
  return bytes.size;
}
