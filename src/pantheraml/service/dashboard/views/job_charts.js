// @ts-check
// The charts of a job: figures over its steps, and its devices over time.

import { get, jobPath } from "../api.js";
import { Chart } from "../chart.js";
import { fill, h } from "../dom.js";
import { AXES, positions } from "../figures.js";
import { number, plural, size, whole } from "../format.js";

/** @typedef {import("../figures.js").Figures} Figures */
/** @typedef {import("../figures.js").Axis} Axis */
/** @typedef {import("../chart.js").Line} Line */

const GIB = 2 ** 30;
const SMOOTHING = [["0", "none"], ["10", "light (10 steps)"], ["50", "medium (50 steps)"], ["250", "strong (250 steps)"]];

export class JobCharts {
  /** @param {Figures} figures @param {() => number | null} predicted bytes of memory per device, by the plan */
  constructor(figures, predicted) {
    this.figures = figures;
    this.predicted = predicted;
    const stored = localStorage.getItem("axis") ?? "step";
    this.axis = h("select", { id: "axis", on: { change: () => { localStorage.setItem("axis", this.axis.value); this.refresh(); } } },
      Object.entries({ step: "steps", epoch: "epochs", tokens: "tokens", minutes: "time" }).map(([value, name]) => h("option", { value, selected: value === stored }, name)));
    this.smoothing = h("select", { id: "smoothing", on: { change: () => this.refresh() } }, SMOOTHING.map(([value, name]) => h("option", { value }, name)));
    this.log = h("input", { type: "checkbox", id: "log", on: { change: () => this.refresh() } });
    this.loss = new Chart("Loss", { wide: true });
    this.rate = new Chart("Learning rate");
    this.norm = new Chart("Gradient norm");
    this.speed = new Chart("Tokens per second");
    this.memory = new Chart("Memory per process, GiB");
    this.perplexity = new Chart("Perplexity on evaluation data");
    this.chosen = false;
    this.element = h("div", {},
      h("div", { class: "controls" }, h("label", { class: "inline" }, "Over ", this.axis), h("label", { class: "inline" }, "Smoothing ", this.smoothing), h("label", { class: "inline" }, this.log, "Log scale of loss and norm")),
      this.grid = h("div", { class: "charts" }, [this.loss, this.rate, this.norm, this.speed, this.memory].map(chart => chart.element)));
  }

  refresh() {
    const axis = /** @type {Axis} */ (this.axis.value), log = this.log.checked, x = AXES[axis];
    if (!this.chosen && this.figures.trace("train_loss").total >= 60) { this.smoothing.value = this.figures.trace("train_loss").total >= 400 ? "50" : "10"; this.chosen = true; }
    const span = Number(this.smoothing.value);
    const single = (/** @type {Chart} */ chart, /** @type {string} */ name, /** @type {string} */ sentence, more = {}) =>
      chart.show({ x, lines: [this.#line(name, chart.title, "other", axis)], sentence, ...more });
    this.loss.show({ x, log, lines: this.#losses(axis, span), sentence: this.#lossSentence() });
    single(this.rate, "learning_rate", this.#range("learning_rate", "Learning rate"), { zero: true, ticks: "~e" });
    this.norm.show({ x, log, zero: !log, lines: this.#norms(axis), sentence: this.#normSentence() });
    single(this.speed, "tokens_per_second", this.#range("tokens_per_second", "Speed", "tokens/s"), { zero: true });
    this.#showMemory(axis, x);
    if (!this.figures.trace("perplexity").total) return;
    if (!this.perplexity.element.isConnected) this.grid.append(this.perplexity.element);
    const trace = this.#line("perplexity", this.perplexity.title, "eval", axis);
    this.perplexity.show({ x, log, lines: [trace], sentence: this.#range("perplexity", "Perplexity") });
  }

  /** @param {string} name @param {string} title @param {string} color @param {Axis} axis @returns {Line} */
  #line(name, title, color, axis) {
    const trace = this.figures.trace(name);
    return { name: title, color, x: positions(trace, axis), y: trace.values };
  }

  /** @param {Axis} axis @param {number} span @returns {Line[]} */
  #losses(axis, span) {
    const each = this.#line("train_loss", "training", "train", axis);
    const smooth = span ? this.figures.smoothed.get(span) : undefined;
    const lines = smooth
      ? [{ ...each, name: "training, each step", color: "faint", faint: true }, { name: "training, smoothed", color: "train", x: positions(smooth, axis), y: smooth.values }]
      : [each];
    return [...lines, this.#line("valid_loss", "evaluation", "eval", axis)];
  }

  #lossSentence() {
    const { steps, values, total } = this.figures.trace("train_loss");
    if (!values.length) return "No step has been logged yet.";
    const low = Math.min(...values), at = steps[values.indexOf(low)];
    const evals = this.figures.trace("valid_loss");
    const last = evals.values.length ? ` Evaluation loss ${number(evals.values.at(-1))} at step ${whole(evals.steps.at(-1))}.` : "";
    return `Training loss went from ${number(values[0])} to ${number(values.at(-1))} over ${plural(total, "logged step")}; lowest ${number(low)} at step ${whole(at)}.${last}`;
  }

  /** @param {Axis} axis @returns {Line[]} */
  #norms(axis) {
    const line = this.#line("grad_norm", "gradient norm", "other", axis), trace = this.figures.trace("grad_norm");
    const marks = [...this.figures.verdicts.values()];
    if (!marks.length) return [line];
    const top = trace.values.length ? Math.max(...trace.values) : 1;
    const place = marks.map(mark => nearest(trace.steps, mark.step));
    const x = marks.map((mark, index) => (axis === "step" ? mark.step : line.x[place[index] ?? -1] ?? null));
    const y = marks.map((mark, index) => (trace.steps[place[index] ?? -1] === mark.step ? trace.values[place[index] ?? -1] ?? top : top));
    return [line, { name: "verdict of the guard", color: "bad", x, y, labels: marks.map(mark => mark.text) }];
  }

  #normSentence() {
    const count = this.figures.verdicts.size;
    return this.#range("grad_norm", "Gradient norm") + (count ? ` The guard judged ${plural(count, "step")}, marked by crosses.` : "");
  }

  /** @param {string} name @param {string} title @param {string} [unit] */
  #range(name, title, unit = "") {
    const { values } = this.figures.trace(name);
    if (!values.length) return `${title}: no figure yet.`;
    return `${title} ${number(values.at(-1))}${unit && ` ${unit}`} now; between ${number(Math.min(...values))} and ${number(Math.max(...values))}.`;
  }

  /** @param {Axis} axis @param {string} x */
  #showMemory(axis, x) {
    const trace = this.figures.trace("memory_bytes"), at = positions(trace, axis), predicted = this.predicted();
    const lines = [{ name: "measured", color: "other", x: at, y: trace.values.map(bytes => bytes / GIB) }];
    if (predicted !== null && at.length) lines.push(/** @type {any} */ ({ name: "predicted by the plan", color: "eval", dashed: true, x: [at[0], at.at(-1)], y: [predicted / GIB, predicted / GIB] }));
    const most = trace.values.length ? Math.max(...trace.values) : null;
    const sentence = most === null ? "No memory was measured." : `At most ${size(most)}; ${predicted === null ? "the plan made no prediction" : `the plan predicted ${size(predicted)}`}.`;
    this.memory.show({ x, lines, sentence, zero: true });
  }
}

/** Index of the last step that is not after `step`; -1: none. @param {number[]} steps @param {number} step */
function nearest(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) { const middle = (low + high) >> 1; if ((steps[middle] ?? 0) <= step) low = middle + 1; else high = middle; }
  return low - 1;
}

/** GPUs and host over the time of a job. */
export class HardwareCharts {
  /** @param {string} id */
  constructor(id) {
    this.id = id;
    this.cursor = 0;
    /** @type {any[]} */
    this.samples = [];
    this.element = h("div", { class: "charts" });
    /** @type {Map<string, Chart>} */
    this.charts = new Map();
  }

  /** Fetch what is new, and draw. @param {AbortSignal} signal */
  async update(signal) {
    for (let complete = false; !complete && !signal.aborted;) {
      const found = await get(`${jobPath(this.id)}/hardware?after=${this.cursor}`, signal);
      this.samples.push(...found.samples);
      this.cursor = found.cursor;
      complete = found.complete;
    }
    if (this.samples.length > 3000) this.samples = this.samples.filter((_, index) => index % 2 === 1);
    this.#draw();
  }

  #draw() {
    if (!this.samples.length) { if (!this.charts.size) fill(this.element, h("p", { class: "soft" }, "No telemetry has been recorded yet.")); return; }
    const indices = [...new Set(this.samples.flatMap(sample => sample.indices))].sort((a, b) => a - b);
    const column = (/** @type {string} */ key, scale = 1) => indices.map((index, place) => ({
      name: `GPU ${index}`, color: `run${place % 6}`, x: this.#times(),
      y: this.samples.map(sample => { const at = sample.indices.indexOf(index), value = at < 0 ? null : sample[key]?.[at]; return value === null || value === undefined ? null : value * scale; }),
    }));
    this.#show("GPU utilization, %", column("utilization_percent"), 100);
    this.#show("GPU memory in use, GiB", column("memory_bytes", 1 / GIB));
    this.#show("GPU power, W", column("power_watts"));
    this.#show("GPU temperature, °C", column("temperature_celsius"));
    this.#show("CPU of the host, %", [{ name: "CPU", color: "other", x: this.#times(), y: this.samples.map(sample => sample.cpu_percent) }], 100);
    this.#show("Memory of the host in use, GiB", [{ name: "Memory", color: "other", x: this.#times(), y: this.samples.map(sample => sample.ram_bytes / GIB) }]);
  }

  #times() {
    return this.samples.map(sample => new Date(1000 * sample.time).toISOString());
  }

  /** @param {string} title @param {Line[]} lines @param {number} [top] */
  #show(title, lines, top) {
    const known = lines.filter(line => line.y.some(value => value !== null));
    if (!known.length) return;
    let chart = this.charts.get(title);
    if (!chart) {
      if (!this.charts.size) this.element.replaceChildren();
      chart = new Chart(title);
      this.charts.set(title, chart);
      this.element.append(chart.element);
    }
    const sentence = known.map(line => { const values = /** @type {number[]} */ (line.y.filter(value => value !== null)); return `${line.name}: ${number(values.at(-1), 3)} last, at most ${number(Math.max(...values), 3)}`; }).join("; ");
    chart.show({ x: "time", lines: known, sentence: `${sentence}.`, zero: true, top });
  }
}
