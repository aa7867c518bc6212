// Markdown of a model: markdown-it reads it (without HTML), and its tokens become elements here, one by one. No markup is
// ever turned into elements by the browser; links lead nowhere, and no image is fetched.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { load } from "./load.js";
import { formula } from "./math.js";
import { visible } from "./format.js";

const ELEMENTS = new Set("p h1 h2 h3 h4 h5 h6 ul ol li blockquote hr pre code em strong s table thead tbody tr th td br".split(" "));
const LONGEST = 100_000;
const DEEP = /^(\s*([>*+-]|\d+[.)])){15,}/m; // the reader would leave out what is nested so deeply
const MATHS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
let reader;

// $...$, $$...$$, \(...\) and \[...\] are formulas, but amounts of money are not: "$5 and $6".
function readMath(state, silent) {
  for (const [open, close, display] of MATHS) {
    if (!state.src.startsWith(open, state.pos)) continue;
    const from = state.pos + open.length;
    const end = state.src.indexOf(close, from);
    const text = end < 0 ? "" : state.src.slice(from, end);
    if (!text.trim() || (open === "$" && (/^\s|\s$|\n\n/.test(text) || /\d/.test(state.src[end + 1] || "")))) continue;
    if (!silent) Object.assign(state.push("math", "", 0), { content: text, markup: open, meta: display });
    state.pos = end + close.length;
    return true;
  }
  return false;
}

export async function loadMarkdown() {
  if (!reader) {
    const [markdownit, temml] = await Promise.all([load("markdownit", "markdown-it.js"), load("temml", "temml.js")]);
    const parser = markdownit({ html: false, linkify: false, breaks: true, maxNesting: 40 });
    parser.inline.ruler.before("escape", "math", readMath);
    reader = { parser, temml };
  }
  return reader;
}

function attach(parent, tokens, { temml }) {
  const stack = [parent];
  const top = () => stack[stack.length - 1];
  const add = (name, text) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    top().append(element);
    return element;
  };
  for (const token of tokens) {
    if (token.type === "inline") attach(top(), token.children, { temml });
    else if (token.type === "math") top().append(formula(temml, token.content, token.meta) || code(token.markup + token.content));
    else if (token.type === "text" || token.type === "html_inline" || token.type === "html_block") top().append(token.content);
    else if (token.type === "softbreak" || token.type === "hardbreak") add("br");
    else if (token.type === "code_inline") add("code", token.content);
    else if (token.type === "fence" || token.type === "code_block") add("pre", token.content).className = "data";
    else if (token.type === "image") picture(add, token);
    else if (token.type === "link_open") stack.push(Object.assign(add("span"), { className: "link", title: `a link, not followed: ${token.attrGet("href") || ""}` }));
    else if (token.nesting === 1) stack.push(token.hidden ? top() : add(ELEMENTS.has(token.tag) ? token.tag : "div"));
    else if (token.nesting === -1) stack.length > 1 && stack.pop();
    else if (ELEMENTS.has(token.tag)) add(token.tag);
    else top().append(token.content);
  }
}

function code(text) {
  return Object.assign(document.createElement("code"), { textContent: text, className: "unread" });
}

export const PICTURE = /^data:image\/(png|jpe?g|gif|webp|bmp|avif);base64,[A-Za-z0-9+/=\s]+$/;

function picture(add, token) {
  const source = token.attrGet("src") || "";
  if (PICTURE.test(source)) Object.assign(add("img"), { src: source, alt: token.content });
  else Object.assign(add("span", `[picture: ${token.content || source.slice(0, 80)}]`), { className: "link", title: "not fetched" });
}

export function Markdown({ text }) {
  const box = useRef(null);
  const [problem, set] = useState(null);
  useEffect(() => {
    let gone = false;
    if (!box.current) return undefined;
    loadMarkdown().then((found) => {
      if (gone) return;
      const parts = document.createDocumentFragment();
      attach(parts, found.parser.parse(visible(text), {}), found);
      box.current.replaceChildren(parts);
    }).catch((error) => !gone && set(error));
    return () => {
      gone = true;
    };
  }, [text]);
  if (problem || text.length > LONGEST || DEEP.test(text)) return html`<pre dir="auto">${visible(text)}</pre>`;
  return html`<div class="markdown" dir="auto" ref=${box}></div>`;
}
