// Saves the rollouts that a query selects as a file: JSON lines, parquet, or Inspect's `.eval`.
import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { save } from "./api.js";
import { useRun } from "./follow.js";
import { isKept } from "./kept.js";
import { announce } from "./keys.js";

const FORMATS = { jsonl: "JSON lines", parquet: "parquet", eval: "Inspect .eval" };

export function ExportMenu({ run, query }) {
  const [state, set] = useState(null);
  const name = useRun(run)?.name.replace(/[^\w.-]+/g, "-") || "run";
  if (isKept()) return null;
  const start = async (event) => {
    const format = event.target.value;
    event.target.value = "";
    set("…");
    try {
      await save("export", { run, query, format }, `${name}-selected.${format}`);
      set("✓");
      announce("Saved");
    } catch (error) {
      set(error.remedy ? `${error.message} ${error.remedy}` : error.message);
    }
  };
  return html`<label class="pick">Export <select value="" onChange=${start} aria-label="Export what the query selects">
      <option value="" disabled>as…</option>
      ${Object.entries(FORMATS).map(([format, says]) => html`<option value=${format}>${says}</option>`)}
    </select> <span class="said" role="status">${state}</span></label>`;
}
