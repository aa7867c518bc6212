// The content of a message: texts, images, reasoning, tool calls. Text is never markup; long texts are first shown in part.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { count, plain, plural, seconds, visible } from "./format.js";
import { highlight } from "./highlight.js";
import { Markdown, PICTURE } from "./markdown.js";

const LETTERS = 6000;
const LINES = 60;

// The beginning of a long text, and whether there is more.
function cut(text) {
  let end = Math.min(text.length, LETTERS);
  for (let at = -1, line = 0; line < LINES; line += 1) {
    at = text.indexOf("\n", at + 1);
    if (at < 0 || at >= end) return [text.slice(0, end), text.length - end];
    if (line === LINES - 1) end = at;
  }
  return [text.slice(0, end), text.length - end];
}

// Whether a text is a board, a table or a drawing: lines of equal length, or lines of drawing characters.
function isDrawn(text) {
  const lines = text.slice(0, 4000).split("\n").map((line) => line.trimEnd()).filter(Boolean);
  if (lines.length < 3) return false;
  const drawn = lines.filter((line) => /[│─┌┐└┘├┤║═█▓░]|^[+|#.]|[-=_#]{4}/.test(line)).length;
  return drawn > lines.length / 2 || lines.every((line) => line.length === lines[0].length && line.length < 120);
}

export function Text({ text, markdown = false, data = false }) {
  const [whole, set] = useState(false);
  const [shown, more] = whole ? [text, 0] : cut(text);
  return html`${markdown && !data && !isDrawn(shown) ? html`<${Markdown} text=${shown} />` : html`<pre class=${data ? "data" : isDrawn(shown) ? "drawn" : "speech"} dir="auto">${highlight(visible(shown))}</pre>`}
    ${more > 0 && html`<button class="quiet more" onClick=${() => set(true)}>Show ${count(more)} more characters</button>`}`;
}

function Picture({ source }) {
  const [large, set] = useState(false);
  if (!PICTURE.test(source)) return html`<p class="absent">an image that is not in the trace: ${visible(source.slice(0, 120))}</p>`;
  return html`<button class=${`picture${large ? " large" : ""}`} aria-label=${large ? "Make the image small" : "Make the image large"} onClick=${() => set(!large)}><img src=${source} alt="" /></button>`;
}

function sourceOf(part) {
  const given = part.image_url ?? part.image ?? part.source ?? part.url;
  if (given?.data) return `data:${given.media_type || "image/png"};base64,${given.data}`;
  return typeof given === "string" ? given : given?.url || "";
}

// The parts of a content: texts and images.
export function Content({ content, markdown, data }) {
  if (content == null || content === "") return null;
  if (typeof content === "string") return html`<${Text} text=${content} markdown=${markdown} data=${data} />`;
  if (!Array.isArray(content)) return html`<${Text} text=${plain(content)} data />`;
  return content.map((part) => {
    if (typeof part === "string") return html`<${Text} text=${part} markdown=${markdown} data=${data} />`;
    if (/image/.test(part?.type || "")) return html`<${Picture} source=${sourceOf(part)} />`;
    if (typeof part?.text === "string") return html`<${Text} text=${part.text} markdown=${markdown} data=${data} />`;
    return html`<${Text} text=${plain(part)} data />`;
  });
}

const THOUGHT = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;

// The reasoning before the answer: a separate field, or <think> at the beginning of the text.
export function thoughtOf(message) {
  const own = message.reasoning_content || message.reasoning || message.thinking;
  if (typeof own === "string" && own) return [own, message.content];
  const found = typeof message.content === "string" && THOUGHT.exec(message.content);
  return found && found[1].trim() ? [found[1].trim(), message.content.slice(found[0].length).trimStart()] : [null, message.content];
}

function readArguments(text) {
  try {
    return typeof text === "string" ? JSON.parse(text) : text;
  } catch {
    return text;
  }
}

function Arguments({ value }) {
  const read = readArguments(value);
  if (read && typeof read === "object" && !Array.isArray(read)) {
    const pairs = Object.entries(read);
    return html`<dl class="arguments">${pairs.map(([name, each]) => html`<dt>${visible(name)}</dt><dd><${Text} text=${plain(each)} data /></dd>`)}</dl>`;
  }
  return html`<${Text} text=${plain(read)} data />`;
}

export function Call({ call }) {
  return html`<div class=${`call${call.error ? " failed" : ""}`}>
    <div class="call-head"><span class="tool">${visible(call.name || "?")}</span>${call.seconds != null && html`<small>${seconds(call.seconds)}</small>`}${call.error && html`<span class="badge bad">${visible(call.error).slice(0, 120)}</span>`}</div>
    <${Arguments} value=${call.arguments} />
    ${call.result !== undefined && html`<div class="result"><span class="arrow" aria-label="result">→</span><div><${Content} content=${call.result === "" ? "(empty)" : call.result} data /></div></div>`}
  </div>`;
}

// The calls of a message with their results: from the trace, or else from the messages after it.
export function callsOf(turn, later = []) {
  if (turn.calls?.length) return turn.calls;
  return (turn.message?.tool_calls || []).map((call) => {
    const result = later.find((message) => message.role === "tool" && message.tool_call_id === call.id);
    return { id: call.id, name: call.function?.name || call.name, arguments: call.function?.arguments ?? call.arguments, result: result?.content };
  });
}

export function Message({ message, markdown, children }) {
  const [thought, content] = thoughtOf(message);
  const role = String(message.role || "?");
  return html`<article class=${`message from-${/^[a-z]+$/.test(role) ? role : "other"}`} aria-label=${role}>
    <header>${visible(role)}${message.name ? html` <small>${visible(String(message.name))}</small>` : ""}</header>
    <div class="body">
      ${thought && html`<details class="thought"><summary>Reasoning <small>${plural(thought.length, "character")}</small></summary><${Text} text=${thought} markdown=${markdown} /></details>`}
      <${Content} content=${content} markdown=${markdown} data=${role === "tool"} />
      ${children}
    </div>
  </article>`;
}
