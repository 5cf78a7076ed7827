// @ts-check
// Charts by plotly.js, which is loaded after the first paint. Each has a sentence and a data table for those who do not
// see it. At most one chart is drawn in a frame, none that is out of view, and none more often than once a second.

import { fill, h, table } from "./dom.js";
import { number } from "./format.js";

/**
 * @typedef {object} Line
 * @property {string} name
 * @property {string} color a name of the style sheet
 * @property {(number | string | null)[]} x
 * @property {(number | null)[]} y
 * @property {boolean} [faint]
 * @property {boolean} [dashed]
 * @property {boolean} [hidden] not in the legend
 * @property {string[]} [labels] marks with texts, without a line
 * @property {boolean} [steps] as stairs
 */
/**
 * @typedef {object} Drawing
 * @property {string} x
 * @property {Line[]} lines
 * @property {string} sentence
 * @property {boolean} [log]
 * @property {boolean} [zero]
 * @property {number} [top]
 * @property {string} [ticks]
 */

const PAUSE_MS = 1000;
const TABLE_ROWS = 60;

/** @type {Promise<any> | null} */
let loading = null;

/** @returns {Promise<any>} plotly */
export function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const start = () => {
      const script = document.createElement("script");
      script.src = "/dashboard/plotly.js";
      script.onload = () => resolve(/** @type {any} */ (window).Plotly);
      script.onerror = () => { loading = null; script.remove(); reject(new Error("plotly.js could not be loaded")); };
      document.head.append(script);
    };
    requestAnimationFrame(() => setTimeout(start));
  });
  return loading;
}

/** @type {Set<Chart>} */
const waiting = new Set();
let running = false;

/** Draw what waits, one chart a frame. */
async function drawNext() {
  if (running) return;
  running = true;
  try {
    const Plotly = await plotly();
    while (waiting.size) {
      await new Promise(resolve => requestAnimationFrame(resolve));
      for (const chart of waiting) if (!chart.plot.isConnected) waiting.delete(chart);
      for (const chart of Chart.drawn) if (!chart.plot.isConnected) { Chart.drawn.delete(chart); Plotly.purge(chart.plot); }
      const now = performance.now();
      const ready = [...waiting].find(chart => chart.inView && now - chart.drawnAt >= PAUSE_MS);
      if (ready) { waiting.delete(ready); ready.draw(Plotly); await new Promise(resolve => setTimeout(resolve)); }
      else if (![...waiting].some(chart => chart.inView)) break;
      else await new Promise(resolve => setTimeout(resolve, 60));
    }
  } catch (err) {
    for (const chart of waiting) chart.fail(String(err instanceof Error ? err.message : err));
  } finally {
    running = false;
  }
}

const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const chart = Chart.of.get(entry.target);
    if (chart) { chart.inView = entry.isIntersecting; if (entry.isIntersecting && waiting.has(chart)) void drawNext(); }
  }
}, { rootMargin: "200px" });

export class Chart {
  /** @type {WeakMap<Element, Chart>} */
  static of = new WeakMap();

  /** @param {string} title @param {{ wide?: boolean }} [options] */
  constructor(title, { wide = false } = {}) {
    this.title = title;
    this.inView = false;
    this.drawnAt = -Infinity;
    /** @type {Drawing | null} */
    this.drawing = null;
    this.plot = h("div", { class: "plot", role: "img", "aria-label": title }, h("div", { class: "waiting" }, "Waiting for the first figures"));
    this.sentence = h("p", { class: "sentence" });
    this.details = h("details", { on: { toggle: () => this.#tabulate() } }, h("summary", {}, "Data table"));
    this.box = h("div", { class: "tablebox", tabindex: 0, role: "region", "aria-label": `${title}: data` });
    this.details.append(this.box);
    this.element = h("section", { class: `card chart${wide ? " wide" : ""}`, "aria-label": title }, h("h2", { class: "title" }, title), this.plot, this.sentence, this.details);
    Chart.of.set(this.plot, this);
    watcher.observe(this.plot);
  }

  /** @type {Set<Chart>} what plotly.js holds, until it is off the page */
  static drawn = new Set();

  /** @param {Drawing} drawing */
  show(drawing) {
    this.drawing = drawing;
    if (this.sentence.textContent !== drawing.sentence) {
      this.sentence.textContent = drawing.sentence;
      this.plot.setAttribute("aria-label", `${this.title}. ${drawing.sentence}`);
    }
    if (!drawing.lines.some(line => line.y.length)) return;
    const note = this.plot.querySelector(":scope > .waiting");
    if (note) note.textContent = "Drawing";
    waiting.add(this);
    if (this.inView) void drawNext();
  }

  /** @param {string} why */
  fail(why) {
    fill(this.plot, h("div", { class: "waiting" }, `${why}; the data table has the figures.`));
  }

  /** @param {any} Plotly */
  draw(Plotly) {
    if (!this.drawing || !this.plot.isConnected) return;
    if (this.plot.querySelector(":scope > .waiting")) this.plot.replaceChildren();
    this.drawnAt = performance.now();
    Chart.drawn.add(this);
    Plotly.react(this.plot, traces(this.drawing), layout(this.drawing), { responsive: true, displayModeBar: false, displaylogo: false });
    this.plot.dataset.points = String(this.drawing.lines.reduce((sum, line) => sum + line.y.length, 0));
    if (this.details.open) this.#tabulate();
  }

  #tabulate() {
    if (!this.details.open || !this.drawing) return;
    const parts = this.drawing.lines.filter(line => line.y.length && !line.faint).map(line => {
      const stride = Math.max(1, Math.ceil(line.y.length / TABLE_ROWS));
      const rows = line.y.map((value, index) => [line.x[index], line.labels?.[index] ?? value])
        .filter((_, index) => index % stride === 0 || index === line.y.length - 1)
        .map(([x, y]) => [typeof x === "number" ? number(x, 6) : x, typeof y === "number" ? number(y, 5) : y]);
      return table(line.name, [this.drawing?.x ?? "", line.name], rows, { numbers: [0, 1] });
    });
    fill(this.box, parts);
  }
}

/** plotly.js reads a few tags in texts; a job's name is none. @param {string} text */
const plain = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

const css = (/** @type {string} */ name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** @param {Drawing} drawing */
function traces({ lines, x }) {
  return lines.filter(line => line.y.length).map(line => ({
    x: [...line.x], y: [...line.y], // copies: plotly.js takes the same array for the same figures
    name: plain(line.name), type: "scatter", connectgaps: false,
    showlegend: !line.hidden && lines.length > 1, text: line.labels?.map(plain),
    mode: line.labels ? "markers" : line.y.length < 40 ? "lines+markers" : "lines",
    line: { color: css(line.color), width: line.faint ? 1 : 2, dash: line.dashed ? "dash" : "solid", shape: line.steps ? "hv" : "linear" },
    marker: { color: css(line.color), size: line.labels ? 10 : 5, symbol: line.labels ? "x-thin" : "circle", line: { width: line.labels ? 2.5 : 0, color: css(line.color) } },
    hovertemplate: `${x} %{x:,}<br>${line.labels ? "%{text}" : "%{y:.5g}"}<extra>${lines.length > 1 ? "%{fullData.name}" : ""}</extra>`,
  }));
}

/** @param {Drawing} drawing */
function layout({ x, log, zero, top, ticks, lines }) {
  const legend = lines.filter(line => line.y.length && !line.hidden).length > 1;
  const axis = { gridcolor: css("grid"), linecolor: css("line"), zeroline: false, automargin: true, fixedrange: false };
  return {
    margin: { l: 46, r: 10, t: legend ? 22 : 8, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: `${x}${log}`,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("soft") },
    legend: { orientation: "h", x: 1, xanchor: "right", y: 1, yanchor: "bottom" },
    xaxis: { ...axis, title: { text: x, standoff: 4 } },
    yaxis: { ...axis, type: log ? "log" : "linear", rangemode: zero ? "tozero" : "normal", tickformat: ticks ?? "", ...(top ? { range: [0, top] } : {}) },
    hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: css("ink") } },
  };
}

/** Colors have changed. */
export function redrawAll() {
  for (const chart of Chart.drawn) if (chart.drawing) { chart.drawnAt = -Infinity; chart.show(chart.drawing); }
}

/**
 * A line without axes, for cards. @param {number[]} values @param {string} label
 */
export function sparkline(values, label, color = "train") {
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const points = values.map((value, index) => `${((100 * index) / Math.max(1, values.length - 1)).toFixed(2)},${(40 - (36 * (value - low)) / span).toFixed(2)}`);
  const image = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const attributes = { viewBox: "0 0 100 44", preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": label };
  for (const [name, value] of Object.entries(attributes)) image.setAttribute(name, value);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.join(" "));
  line.setAttribute("fill", "none");
  line.setAttribute("vector-effect", "non-scaling-stroke");
  line.style.stroke = `var(--${color})`;
  line.style.strokeWidth = "2";
  image.append(line);
  return image;
}
