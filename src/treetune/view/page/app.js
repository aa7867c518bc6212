// The page: the view that the address names, within the bars that every view has.
import { render } from "./vendor/preact.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { go, link, read, useAddress } from "./address.js";
import { setToken, takeToken } from "./api.js";
import { Instead, forget, useAnswer } from "./answer.js";
import { Compare } from "./compare.js";
import { follow, refresh, useRuns, versionOf } from "./follow.js";
import { number } from "./format.js";
import { Groups } from "./groups.js";
import { isKept, keptNote } from "./kept.js";
import { knownKeys, listen, useKeys } from "./keys.js";
import { Rescore } from "./rescore.js";
import { Rollout } from "./rollout.js";
import { Rollouts } from "./rollouts.js";
import { RunView } from "./run.js";
import { Runs } from "./runs.js";
import { Suspicious } from "./suspicious.js";
import { ThemeSwitch, applyTheme, nextTheme } from "./theme.js";

const TABS = [["", "Overview", RunView, "o"], ["groups", "Groups", Groups, "g"], ["rollouts", "Rollouts", Rollouts, "a"], ["suspicious", "Suspicious", Suspicious, "s"], ["rescore", "Rescore", Rescore, "e"]];

function Help({ onClose }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  const names = { ArrowLeft: "←", ArrowRight: "→", Escape: "Esc" };
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="help-title" onClick=${(event) => event.target === dialog.current && dialog.current.close()}><form method="dialog">
    <h2 id="help-title">Keys</h2><dl class="keys">${[...knownKeys()].map(([key, says]) => html`<div><dt><kbd>${names[key] || key}</kbd></dt><dd>${says}</dd></div>`)}
      <div><dt><kbd>← ↑ ↓ →</kbd></dt><dd>move through a table</dd></div><div><dt><kbd>Enter</kbd></dt><dd>open the selected row</dd></div></dl>
    <button class="main">Close</button></form></dialog>`;
}

function TokenForm() {
  const take = (event) => {
    event.preventDefault();
    setToken(new FormData(event.currentTarget).get("token").trim());
    forget();
    refresh();
  };
  return html`<form class="card token-form" onSubmit=${take}><label>This server requires its token, which is in the address that \`treetune view\` printed.<input name="token" type="password" autocomplete="off" required /></label><button class="main">Use it</button></form>`;
}

function RunShell({ id, tab, path, params, runs }) {
  const row = runs.find((run) => run.id === id);
  const version = versionOf(row);
  const { data, error } = useAnswer(row ? "run" : "", row ? { run: id } : null, version);
  useKeys(Object.fromEntries(TABS.filter(([name]) => !isKept() || name !== "rescore").map(([name, says, , key]) => [key, [says.toLowerCase(), () => go(["run", id, name].filter((part) => part !== ""))]])));
  if (!row) return html`<${Instead} error=${{ message: `There is no run ${id} here.`, remedy: "Go back to the runs." }} />`;
  const [, , View] = TABS.find(([name]) => name === tab) || [];
  if (tab === "at") return html`<${Rollout} run=${id} at=${path[3]} tab=${path[4]} info=${data} params=${params} version=${version} />`;
  if (!View) return html`<${Instead} error=${{ message: "There is no such view.", remedy: null }} />`;
  // Lists need not wait for the figures of the whole run.
  if (!data && View === RunView) return html`<${Instead} error=${error} />`;
  return html`<${View} run=${id} info=${data} params=${params} version=${version} />`;
}

function Share({ read }) {
  return read != null && read < 1 ? html`<span class="badge" role="status">${Math.floor(100 * read)} % read</span>` : null;
}

function Tabs({ id, tab }) {
  return html`<nav class="tabs" aria-label="Views of the run">${TABS.filter(([name]) => !isKept() || name !== "rescore").map(([name, says, , key]) => html`<a href=${link(["run", id, name].filter((part) => part !== ""))} aria-current=${name === tab ? "page" : null} title=${`${says} (${key})`}>${says}</a>`)}</nav>`;
}

function App() {
  const { path, params } = useAddress();
  const { answer, error, lost } = useRuns();
  const [help, setHelp] = useState(false);
  const runs = answer?.runs || [];
  const id = path[0] === "run" ? Number(path[1]) : null;
  const tab = path[0] === "run" ? path[2] || "" : null;
  const row = runs.find((run) => run.id === id);
  useKeys({ "?": ["these keys", () => setHelp(true)], r: ["runs", () => go([])], d: ["dark or light", nextTheme], Escape: [null, () => (tab ? go(["run", id]) : go([]))] });
  useEffect(() => {
    document.title = [row?.name, path[0] === "compare" && "Compare", "Treetune"].filter(Boolean).join(" · ");
  }, [row?.name, path[0]]);
  useEffect(() => {
    // A single run is opened at once.
    if (answer && runs.length === 1 && !read().path.length) go(["run", runs[0].id], {}, true);
  }, [answer !== null]);
  useEffect(() => {
    // The focused element may be gone with the previous view.
    const timer = setTimeout(() => document.activeElement === document.body && document.getElementById("title")?.focus({ preventScroll: true }), 50);
    return () => clearTimeout(timer);
  }, [path.slice(0, 3).join("/")]);
  let view;
  if (error) view = error.status === 401 ? html`<${TokenForm} />` : html`<${Instead} error=${error} />`;
  else if (!answer) view = html`<${Instead} />`;
  else if (path[0] === "run") view = html`<${RunShell} key=${id} id=${id} tab=${tab} path=${path} params=${params} runs=${runs} />`;
  else if (path[0] === "compare") view = html`<${Compare} key=${path[1]} ids=${(path[1] || "").split(",").map(Number)} params=${params} />`;
  else view = html`<${Runs} params=${params} />`;
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <header class="top"><a class="brand" href="#/" aria-label="Treetune: all runs"><span aria-hidden="true" class="leaf"></span>Treetune</a>
      ${row && html`<nav class="crumbs" aria-label="Where you are"><a href="#/">Runs</a><span aria-hidden="true">/</span><h1 id=${tab === "at" ? null : "title"} class="crumb" tabindex="-1"><a href=${link(["run", id])}>${row.name}</a></h1>${row.live && html`<span class="live" title="still being written; this page follows it">live</span>`}<${Share} read=${row.read} /><span class="crumb-mean">${number(row.mean)}</span></nav>`}
      <span class="gap"></span>${lost && html`<span class="badge bad" role="status">the server does not answer</span>`}
      <${ThemeSwitch} /><button class="icon" aria-label="Keys" title="Keys (?)" onClick=${() => setHelp(true)}>?</button></header>
    ${row && html`<${Tabs} id=${id} tab=${tab} />`}
    ${keptNote() && html`<p class="notice top-notice">${keptNote()}</p>`}
    <main id="main" tabindex="-1">${view}</main>
    <div id="voice" class="hidden-text" role="status" aria-live="polite"></div>
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

takeToken();
applyTheme();
listen();
follow();
render(html`<${App} />`, document.body);
