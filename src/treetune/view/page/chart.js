// Charts: columns and curves by uPlot, and small line charts.
//
//   <Chart kind="columns" x=${edges} series=${[{ name: "rollouts", values: counts }]} onPick=${(at) => ...} />
import { useEffect, useRef } from "./vendor/hooks.js";
import { html } from "./html.js";
import { number } from "./format.js";
import { colour } from "./theme.js";

const HEIGHT = 180;
export const CURVES = ["curve0", "curve1", "curve2", "curve3", "curve4", "curve5"];

function axis(rest = {}) {
  const [ink, line] = [colour("soft"), colour("line")];
  return { stroke: ink, font: "11px system-ui, sans-serif", grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, gap: 4, ...rest };
}

function options(width, { kind, x, series, label, range, names, labelY }) {
  const { paths } = globalThis.uPlot;
  let curves = 0;
  const drawn = series.map(({ name, role, scale = "y", dash }) => {
    const bars = (role || kind) === "columns";
    const stroke = colour(bars ? "soft" : CURVES[curves++ % CURVES.length]);
    return {
      label: name, scale, stroke, dash, width: bars ? 0 : dash ? 1.2 : 2, spanGaps: true, points: { show: !bars && !dash && x.length < 60, size: 5, fill: stroke },
      fill: bars ? colour(scale === "count" ? "faint" : "bar") : undefined,
      paths: bars ? paths.bars({ size: [0.9, 60], align: names ? 0 : 1 }) : undefined,
      value: (_, value) => (value == null ? "–" : number(value)),
    };
  });
  const steps = kind === "curve" && !names && { incrs: [1, 2, 5].flatMap((each) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((by) => each * by)).sort((one, other) => one - other) };
  const ticks = names && { splits: () => x, values: (_, at) => at.map((each) => names[each] ?? "") };
  return {
    width, height: HEIGHT, padding: [8, 12, 0, 0], legend: { show: series.length > 1, live: true },
    cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
    scales: {
      x: { time: false, range: names ? [x[0] - 0.6, x[x.length - 1] + 0.6] : range },
      y: { range: (_, low, high) => (kind === "columns" ? [0, (high || 1) * 1.08] : [Math.min(0, low ?? 0), Math.max(1, high ?? 1)]) },
      count: { range: (_, low, high) => [0, (high || 1) * 1.3] },
    },
    axes: [
      axis({ label, labelSize: 18, labelFont: "11px system-ui, sans-serif", grid: { show: false }, size: 28, ...steps, ...ticks }),
      axis({ size: 46, label: labelY, labelSize: labelY ? 16 : 0, labelFont: "11px system-ui, sans-serif", values: (_, at) => at.map((each) => number(each)) }),
    ],
    series: [{ label: label || "x", value: (_, value) => (value == null ? "–" : names ? names[value] : number(value)) }, ...drawn],
  };
}

export function Chart(props) {
  const box = useRef(null);
  const { x, series, title, onPick } = props;
  const pick = useRef(onPick);
  pick.current = onPick;
  useEffect(() => {
    const element = box.current;
    let plot;
    const draw = () => {
      plot?.destroy();
      plot = new globalThis.uPlot(options(Math.max(200, element.clientWidth), props), [x, ...series.map(({ values }) => values)], element);
      plot.over.addEventListener("click", () => plot.cursor.idx != null && pick.current?.(plot.cursor.idx));
    };
    draw();
    const observer = new ResizeObserver(() => {
      const width = element.clientWidth;
      if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    });
    observer.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("theme", draw);
    dark.addEventListener("change", draw);
    return () => {
      observer.disconnect();
      removeEventListener("theme", draw);
      dark.removeEventListener("change", draw);
      plot.destroy();
    };
  }, [JSON.stringify([x, series, props.names])]);
  return html`<figure class=${`chart${onPick ? " picks" : ""}`}><figcaption>${title}</figcaption><div ref=${box} role="img" aria-label=${describe(title, props)}></div></figure>`;
}

// For screen readers: the figures themselves, if there are few.
function describe(title, { x, series, names }) {
  const points = x.slice(0, 40).map((at, index) => `${names ? names[at] : number(at)}: ${series.map(({ values }) => number(values[index])).join(", ")}`);
  return `${title}. ${series.map(({ name }) => name).join(", ")}. ${points.join("; ")}`;
}

export function Spark({ values, span = [0, 1], says }) {
  const known = values.map((value, at) => [at, value]).filter(([, value]) => value != null);
  if (known.length < 2) return html`<span class="spark"></span>`;
  const [low, high] = [Math.min(span[0], ...known.map((point) => point[1])), Math.max(span[1], ...known.map((point) => point[1]))];
  const place = ([at, value]) => `${((at / (values.length - 1)) * 70 + 1).toFixed(1)},${(19 - ((value - low) / (high - low || 1)) * 18).toFixed(1)}`;
  return html`<svg class="spark" viewBox="0 0 72 20" role="img" aria-label=${says || `from ${number(known[0][1])} to ${number(known[known.length - 1][1])}`}>
    <polyline points=${known.map(place).join(" ")} />
  </svg>`;
}

// A value with its error as a line on a common scale.
export function Interval({ value, error, low, high, zero = null }) {
  const place = (each) => `${(100 * Math.min(1, Math.max(0, (each - low) / (high - low || 1)))).toFixed(1)}%`;
  const reach = 1.96 * (error || 0);
  return html`<svg class="interval" role="img" aria-label=${`${number(value)}, 95 %: ${number(value - reach)} to ${number(value + reach)}`}>
    <line class="base" x1="0%" x2="100%" y1="50%" y2="50%" />
    ${zero != null && html`<line class="zero" x1=${place(zero)} x2=${place(zero)} y1="0" y2="100%" />`}
    <line class="reach" x1=${place(value - reach)} x2=${place(value + reach)} y1="50%" y2="50%" />
    <circle cx=${place(value)} cy="50%" r="4" />
  </svg>`;
}
