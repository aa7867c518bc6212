// The query bar: finds rollouts by their facts, completes names, and keeps the query in the address (q=...).
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { change } from "./address.js";
import { useAnswer } from "./answer.js";
import { complete, hasWord, toggle } from "./completion.js";
import { useKeys } from "./keys.js";

const CHIPS = { mixed: "mixed", all0: "all 0", all1: "all 1", failed: "failed", solved: "solved", truncated: "cut off" };
const PAUSE = 350;
const EXAMPLES = [
  ["reward<0.5", "a number: reward, turns, tokens, prompt_tokens, seconds, task, rollout, step, or any metric"],
  ["source=gsm8k", "a text: source, outcome, failure, answer, uid, mark"],
  ["failure~timeout", "a part of a text"],
  ["failed  solved  mixed  all0", "keywords; mixed, all0, all1 and allfailed apply to a group"],
  ['"therefore"', "words in the conversation, ignoring case"],
  ["a & b    a | b    !a    (a | b) c", "both, either, not, and together; adjacent words must all match"],
];

export function useQueryWords(run, info) {
  const { data } = useAnswer("words", {});
  return {
    numbers: data?.numbers || [],
    texts: data?.texts || [],
    words: data?.words || [],
    metrics: data?.metrics?.[run] || [],
    sources: (info?.sources || []).map((source) => source.name),
  };
}

export function QueryBar({ query, words, error, children }) {
  const [text, setText] = useState(query);
  const [chosen, choose] = useState(-1);
  const [open, setOpen] = useState(false);
  const [help, setHelp] = useState(false);
  const input = useRef(null);
  const timer = useRef(0);
  useEffect(() => {
    if (query !== text.trim()) setText(query);
  }, [query]);
  useEffect(() => () => clearTimeout(timer.current), []);
  useKeys({ "/": ["go to the query", () => input.current.select()] });

  const apply = (next, now = true) => {
    clearTimeout(timer.current);
    setText(next);
    const set = () => change({ q: next.trim(), row: null });
    if (now) set();
    else timer.current = setTimeout(set, PAUSE);
  };
  const { from, options } = open ? complete(text, input.current?.selectionStart ?? text.length, words) : { options: [] };
  const take = (option) => {
    const end = input.current.selectionStart;
    const added = option.text + (option.sign || " ");
    const next = text.slice(0, from) + added + text.slice(end);
    choose(-1);
    apply(next, false);
    requestAnimationFrame(() => {
      input.current.focus();
      input.current.setSelectionRange(from + added.length, from + added.length);
    });
  };
  const pressed = (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      setOpen(true);
      const by = event.key === "ArrowDown" ? 1 : -1;
      if (options.length) choose((chosen + by + options.length) % options.length);
    } else if ((event.key === "Enter" || event.key === "Tab") && chosen >= 0 && options[chosen]) {
      event.preventDefault();
      take(options[chosen]);
    } else if (event.key === "Enter") {
      setOpen(false);
      apply(text);
    } else if (event.key === "Escape") {
      event.preventDefault();
      if (open && options.length) setOpen(false);
      else input.current.blur();
      choose(-1);
    }
  };
  const listed = options.slice(0, 12);
  return html`<div class="find">
    <div class="bar" role="search">
      <div class="entry">
        <span class="glass" aria-hidden="true">⌕</span>
        <input ref=${input} type="text" value=${text} placeholder='reward<0.5 & source=… "words"' aria-label="Query"
          role="combobox" aria-expanded=${listed.length > 0} aria-controls="completion" aria-autocomplete="list"
          aria-activedescendant=${chosen >= 0 ? `option-${chosen}` : null} aria-invalid=${Boolean(error)}
          autocomplete="off" autocapitalize="off" spellcheck=${false}
          onInput=${(event) => { setOpen(true); choose(-1); apply(event.target.value, false); }}
          onFocus=${() => setOpen(true)} onBlur=${() => setTimeout(() => setOpen(false), 150)} onKeyDown=${pressed} />
        ${text && html`<button class="icon" aria-label="Clear the query" onClick=${() => { apply(""); input.current.focus(); }}>×</button>`}
        <button class="icon" aria-expanded=${help} aria-label="How to write a query" onClick=${() => setHelp(!help)}>?</button>
        ${listed.length > 0 && html`<ul id="completion" class="menu" role="listbox" aria-label="Completions">
          ${listed.map((option, at) => html`<li id=${`option-${at}`} role="option" aria-selected=${at === chosen}
            onMouseDown=${(event) => { event.preventDefault(); take(option); }}>
            <code>${option.text}${option.sign || ""}</code><span>${option.says}</span>
          </li>`)}
        </ul>`}
      </div>
      <div class="chips" role="group" aria-label="Usual queries">
        ${Object.entries(CHIPS).map(([word, says]) => html`<button class="chip" aria-pressed=${hasWord(query, word)}
          onClick=${() => apply(toggle(query, word))}>${says}</button>`)}
      </div>
      ${children}
    </div>
    ${error && html`<p class="wrong" role="alert"><b>${error.message}</b> ${error.remedy}</p>`}
    ${help && html`<dl class="examples">
      ${EXAMPLES.map(([example, says]) => html`<dt><code>${example}</code></dt><dd>${says}</dd>`)}
    </dl>`}
  </div>`;
}
