// @ts-check
// The figures of one job: thinned by the service, then continued by the events of its stream.

import { get, jobPath } from "./api.js";

/**
 * @typedef {object} Trace
 * @property {number[]} steps
 * @property {number[]} values
 * @property {(number | null)[]} epochs
 * @property {number[]} tokens
 * @property {number[]} seconds
 * @property {number} total
 */
/** @typedef {"step" | "epoch" | "tokens" | "minutes"} Axis */
/** @typedef {{ step: number, action: string, text: string }} Verdict */

export const AXES = /** @type {Record<Axis, string>} */ ({ step: "step", epoch: "epoch", tokens: "tokens", minutes: "minutes of training" });
const OF_STEPS = ["train_loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes"];
const OF_EVALS = ["valid_loss", "perplexity"];
const POINTS = 1500;
const TOO_MANY = 3 * POINTS;

const ACTIONS = /** @type {Record<string, string>} */ ({ step: "taken, with a warning", retry: "run again", zero: "taken without the bad gradients", skip: "skipped", roll_back: "skipped, back to an older checkpoint", stop: "ends the run" });

/** @param {{ action: string, cause: string }} verdict */
const judged = ({ action, cause }) => `${ACTIONS[action] ?? action}: ${cause}`;

/** @returns {Trace} */
const empty = () => ({ steps: [], values: [], epochs: [], tokens: [], seconds: [], total: 0 });

/** @param {Trace} trace @param {Axis} axis @returns {(number | null)[]} */
export function positions(trace, axis) {
  if (axis === "epoch") return trace.epochs;
  if (axis === "tokens") return trace.tokens;
  return axis === "minutes" ? trace.seconds.map(seconds => seconds / 60) : trace.steps;
}

export class Figures {
  /** @param {string} id */
  constructor(id) {
    this.id = id;
    /** @type {Map<string, Trace>} */
    this.traces = new Map();
    /** @type {Map<number, Trace>} smoothed training loss of each span */
    this.smoothed = new Map();
    /** @type {Map<number, Verdict>} */
    this.verdicts = new Map();
    this.cursor = 0;
    this.step = /** @type {number | null} */ (null);
    this.epoch = /** @type {number | null} */ (null);
    this.tokens = 0;
    this.seconds = 0;
    this.totalSteps = /** @type {number | null} */ (null);
  }

  /** Read everything anew. @param {AbortSignal} [signal] */
  async load(signal) {
    const found = await get(`${jobPath(this.id)}/curves?points=${POINTS}`, signal);
    this.traces = new Map(Object.entries(found.metrics));
    this.smoothed = new Map(Object.entries(found.smoothed).map(([span, trace]) => [Number(span), /** @type {Trace} */ (trace)]));
    ({ step: this.step, epoch: this.epoch, tokens: this.tokens, seconds: this.seconds, cursor: this.cursor } = found);
    this.totalSteps = found.total_steps;
    this.verdicts = new Map(found.verdicts.map((/** @type {any} */ each) => [each.step, { step: each.step, action: each.action, text: judged(each) }]));
    return this;
  }

  /** True if so much was added that the service should thin it again. */
  get crowded() {
    return [...this.traces.values()].some(trace => trace.steps.length > TOO_MANY);
  }

  /** @param {string} name */
  trace(name) {
    return this.traces.get(name) ?? empty();
  }

  /** @param {string} name */
  latest(name) {
    return this.trace(name).values.at(-1) ?? null;
  }

  /** Take in an event of the stream; false if it has no figures. @param {any} event @returns {boolean} */
  take(event) {
    const data = event.data ?? {};
    if (event.kind === "verdict") this.verdicts.set(data.step, { step: data.step, action: data.action, text: judged(data) });
    else if (event.kind === "train.started") this.totalSteps = data.total_steps;
    else if (event.kind === "train.step") this.#step(data);
    else if (event.kind === "eval.done") for (const name of OF_EVALS) this.#add(this.#own(name), data.step, data[name]);
    else return false;
    return true;
  }

  /** @param {any} data */
  #step(data) {
    if (this.step !== null && data.step <= this.step) this.#goBack(data.step);
    this.step = data.step;
    this.epoch = data.epoch ?? this.epoch;
    this.tokens += data.tokens ?? 0;
    this.seconds += data.seconds ?? 0;
    for (const name of OF_STEPS) this.#add(this.#own(name), data.step, data[name]);
    if (typeof data.train_loss !== "number") return;
    const count = this.trace("train_loss").total;
    for (const span of [10, 50, 250]) {
      const trace = this.smoothed.get(span) ?? empty();
      this.smoothed.set(span, trace);
      const mean = trace.values.at(-1) ?? data.train_loss;
      this.#add(trace, data.step, mean + Math.max(2 / (span + 1), 1 / count) * (data.train_loss - mean));
    }
  }

  /** @param {string} name */
  #own(name) {
    const trace = this.traces.get(name) ?? empty();
    this.traces.set(name, trace);
    return trace;
  }

  /** @param {Trace} trace @param {number} step @param {unknown} value */
  #add(trace, step, value) {
    if (typeof value !== "number") return;
    trace.steps.push(step);
    trace.values.push(value);
    trace.epochs.push(this.epoch);
    trace.tokens.push(this.tokens);
    trace.seconds.push(this.seconds);
    trace.total += 1;
  }

  /** The run was started again from a checkpoint: later steps are repeated. @param {number} step */
  #goBack(step) {
    for (const trace of [...this.traces.values(), ...this.smoothed.values()]) {
      const keep = trace.steps.findIndex(each => each >= step);
      if (keep < 0) continue;
      trace.total -= trace.steps.length - keep;
      for (const list of [trace.steps, trace.values, trace.epochs, trace.tokens, trace.seconds]) list.length = keep;
    }
    const losses = this.trace("train_loss");
    this.tokens = losses.tokens.at(-1) ?? 0;
    this.seconds = losses.seconds.at(-1) ?? 0;
  }
}
