// @ts-check
// One job, live: what it does now, how it learns, why it was planned so, what it wrote.

import { ApiError, get, jobPath, send } from "../api.js";
import { fill, h, meter, say } from "../dom.js";
import { Figures } from "../figures.js";
import { ago, duration, jobName, moment, number, size, tone, UNKNOWN, unit, whole } from "../format.js";
import { every, follow, pause } from "../live.js";
import { HardwareCharts, JobCharts } from "./job_charts.js";
import { configPart, eventsPart, filesPart, logPart, planPart } from "./job_parts.js";
import { samplesPart } from "./job_samples.js";

/** @typedef {import("../api.js").Job} Job */

export const ENDED = ["succeeded", "failed", "cancelled"];
const ACTIONS = /** @type {Record<string, string[]>} */ ({
  pause: ["queued", "starting", "running"], resume: ["paused"],
  cancel: ["validating", "queued", "paused", "crashed", "starting", "running", "pausing"],
});
const TABS = /** @type {Record<string, string>} */ ({ charts: "Charts", samples: "Before and after", devices: "Devices", plan: "Plan", events: "Events", log: "Log", files: "Files", config: "Configuration" });
const MESSAGES = 300;

/** @type {import("../main.js").View} */
export async function job(main, place) {
  await new JobPage(main, place).run();
}

class JobPage {
  /** @param {HTMLElement} main @param {import("../main.js").Place} place */
  constructor(main, place) {
    this.main = main;
    this.place = place;
    this.id = place.path[0] ?? "";
    this.signal = place.signal;
    this.job = /** @type {Job} */ (/** @type {unknown} */ (null));
    this.plan = /** @type {any} */ (null);
    this.figures = new Figures(this.id);
    this.charts = new JobCharts(this.figures, () => this.plan?.predicted_memory_bytes ?? null);
    this.hardware = new HardwareCharts(this.id);
    /** @type {any[]} messages, newest first */
    this.events = [];
    this.seen = new Set();
    this.head = h("div");
    this.now = h("div");
    this.panel = h("div", { role: "tabpanel", id: "panel", tabindex: -1 });
    this.tab = place.query.get("tab") ?? "charts";
    this.leavingTab = new AbortController();
    this.due = false;
    this.live = h("span", { class: "small soft", role: "status" });
  }

  async run() {
    const [found, plan, , messages] = await Promise.all([
      get(jobPath(this.id), this.signal), get(`${jobPath(this.id)}/plan`, this.signal), this.figures.load(this.signal),
      get(`${jobPath(this.id)}/events?type=message&limit=${MESSAGES}`, this.signal),
    ]);
    this.job = found;
    this.plan = plan;
    this.events = messages.data;
    for (const event of this.events) this.seen.add(event.id);
    document.title = `${jobName(this.job)} · PantheraML`;
    fill(this.main, this.head, this.now, this.#tabs(), this.panel);
    this.#drawHead();
    this.#drawNow();
    this.#open(this.tab);
    void this.#follow().catch(err => this.#problem(err));
    if (!this.ended) void every(4, this.signal, async () => {
      await this.#reload();
      return !this.ended;
    });
  }

  get ended() {
    return ENDED.includes(this.job.state);
  }

  async #follow() {
    await follow(`${jobPath(this.id)}/stream`, {
      after: `ftevent-${this.figures.cursor}`, signal: this.signal,
      onState: state => { this.live.textContent = this.ended ? "" : state === "open" ? "live" : "connection lost; trying again"; },
      onMessage: message => {
        if (message.kind === "end") { void this.#reload().then(() => this.#open(this.tab)); return; }
        this.#take(message.data);
      },
    });
    this.live.textContent = "";
  }

  /** @param {any} event */
  #take(event) {
    this.figures.take(event);
    if (event.type === "message" && !this.seen.has(event.id)) {
      this.seen.add(event.id);
      this.events.unshift(event);
      this.events.length = Math.min(this.events.length, 2 * MESSAGES);
      if (this.tab === "events") this.#later(() => fill(this.panel, eventsPart(this.events)));
      if (event.kind === "state") void this.#reload();
    }
    if (this.due) return;
    this.due = true;
    void pause(0.3, this.signal).then(async () => {
      this.due = false;
      if (this.signal.aborted) return;
      if (this.figures.crowded) await this.figures.load(this.signal);
      this.#drawNow();
      if (this.tab === "charts") this.charts.refresh();
    });
  }

  /** @param {() => void} act */
  #later(act) {
    requestAnimationFrame(act);
  }

  async #reload() {
    const before = this.job.state;
    this.job = await get(jobPath(this.id), this.signal);
    this.#drawHead();
    this.#drawNow();
    if (before !== this.job.state && ENDED.includes(this.job.state) && ["files", "samples"].includes(this.tab)) this.#open(this.tab);
  }

  #drawHead() {
    const { job } = this;
    const action = (/** @type {string} */ name, /** @type {string} */ title, kind = "") =>
      this.place.may("submit") && (ACTIONS[name] ?? []).includes(job.state) && h("button", { type: "button", class: kind, data: { focus: name }, on: { click: () => void this.#act(name) } }, title);
    fill(this.head,
      h("div", { class: "head" }, h("h1", {}, jobName(job)), h("span", { class: `pill ${tone(job.state)}`, data: { state: job.state } }, job.state), this.live,
        h("div", { class: "actions" }, action("resume", "Resume", "main"), action("pause", "Pause"), action("cancel", "Cancel", "danger"),
          job.fine_tuned_model && this.place.may("submit") && h("a", { class: "button main", href: `#/playground?model=${encodeURIComponent(job.fine_tuned_model)}`, data: { focus: "try" } }, "Try it"),
          h("a", { class: "button", href: `#/compare?jobs=${job.id}`, data: { focus: "compare" } }, "Compare"),
          this.place.may("submit") && h("a", { class: "button", href: `#/new?from=${job.id}`, data: { focus: "again" } }, "Duplicate"))),
      h("p", { class: "soft small sub" }, [`model ${job.model}`, job.id, this.place.session.keys_required && `by ${job.organization_id}`, `created ${moment(job.created_at)}`, job.fine_tuned_model].filter(Boolean).join(" · ")),
      job.error && h("div", { class: "alert", role: "alert" }, job.error.message),
      job.waiting_reason && h("div", { class: "alert warn" }, waiting(job)));
  }

  #drawNow() {
    const { figures, job } = this, total = figures.totalSteps, step = figures.step;
    const progress = job.state === "succeeded" ? 1 : total && step !== null ? step / total : 0;
    const epochs = job.hyperparameters.n_epochs;
    const where = step === null ? "no step yet" : `step ${whole(step)}${total ? ` of ${whole(total)}` : ""}${figures.epoch === null ? "" : ` · epoch ${number(figures.epoch, 3)} of ${epochs}`}`;
    const left = job.state === "running" && total && step && step < total ? `about ${duration(((total - step) * figures.seconds) / step)} left` : job.finished_at ? `ended ${ago(job.finished_at)}` : "";
    const figure = (/** @type {string} */ name, /** @type {string} */ value) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, name));
    fill(this.now, meter(progress, "Progress", job.state === "succeeded" ? "good" : job.state === "failed" ? "bad" : ""),
      h("div", { class: "row small soft" }, h("span", { class: "number" }, where), h("span", { class: "number" }, left)),
      h("div", { class: "figures" },
        figure("training loss", number(figures.latest("train_loss"))), figure("evaluation loss", number(figures.latest("valid_loss"))),
        figure("tokens/s", whole(figures.latest("tokens_per_second"))), figure("learning rate", number(figures.latest("learning_rate"), 3)),
        figure("gradient norm", number(figures.latest("grad_norm"), 3)), figure("memory", size(figures.latest("memory_bytes"))),
        figure("tokens trained", whole(figures.tokens)), this.#usage(figure)));
  }

  /** @param {(name: string, value: string) => HTMLElement} figure */
  #usage(figure) {
    const { gpu_hours: gpu, cpu_slot_hours: cpu, cost, energy_joules: joules } = this.job;
    if (cost !== null && cost !== undefined) return figure(`cost, ${number(gpu, 3)} GPU-hours`, number(cost, 3));
    if (joules !== null && joules !== undefined) return figure(`energy, ${number(gpu, 3)} GPU-hours`, unit(joules / 3.6e6, "kWh"));
    return gpu ? figure("GPU-hours", number(gpu, 3)) : figure("CPU slot hours", cpu === undefined ? UNKNOWN : number(cpu, 3));
  }

  #tabs() {
    const list = h("div", { class: "tabs", role: "tablist", "aria-label": "Parts of the job" });
    for (const [name, title] of Object.entries(TABS)) {
      list.append(h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel", on: { click: () => this.#open(name) } }, title));
    }
    list.addEventListener("keydown", event => {
      const names = Object.keys(TABS), move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const next = names[(names.indexOf(this.tab) + move + names.length) % names.length] ?? "charts";
      this.#open(next);
      document.getElementById(`tab-${next}`)?.focus();
    });
    return list;
  }

  /** @param {string} name */
  #open(name) {
    this.leavingTab.abort();
    this.leavingTab = new AbortController();
    const signal = AbortSignal.any([this.signal, this.leavingTab.signal]);
    this.tab = name in TABS ? name : "charts";
    history.replaceState(null, "", `#/job/${this.id}${this.tab === "charts" ? "" : `?tab=${this.tab}`}`);
    for (const each of Object.keys(TABS)) {
      const tab = document.getElementById(`tab-${each}`);
      tab?.setAttribute("aria-selected", String(each === this.tab));
      tab?.setAttribute("tabindex", each === this.tab ? "0" : "-1");
    }
    this.panel.setAttribute("aria-labelledby", `tab-${this.tab}`);
    if (this.tab === "charts") { fill(this.panel, this.charts.element); this.charts.refresh(); }
    else if (this.tab === "devices") {
      fill(this.panel, this.hardware.element);
      void every(3, signal, async () => { await this.hardware.update(signal); return !this.ended; });
    }
    else if (this.tab === "plan") fill(this.panel, planPart(this.plan));
    else if (this.tab === "events") fill(this.panel, eventsPart(this.events));
    else if (this.tab === "log") fill(this.panel, logPart(this.id, () => !this.ended, signal));
    else void this.#load(this.#part(signal), signal);
  }

  /** @param {AbortSignal} signal */
  #part(signal) {
    if (this.tab === "samples") return samplesPart(this.job, this.place.may("submit"), signal);
    return this.tab === "files" ? filesPart(this.id, this.job, signal) : configPart(this.id, this.job, signal);
  }

  /** @param {Promise<HTMLElement>} part @param {AbortSignal} signal */
  async #load(part, signal) {
    try {
      const element = await part;
      if (!signal.aborted) fill(this.panel, element);
    } catch (err) {
      if (!signal.aborted) fill(this.panel, h("div", { class: "alert" }, err instanceof Error ? err.message : String(err)));
    }
  }

  /** @param {string} name */
  async #act(name) {
    if (name === "cancel" && !confirm("Cancel this job? It cannot be resumed.")) return;
    try {
      this.job = await send("POST", `${jobPath(this.id)}/${name}`);
      say({ cancel: "Cancelling", pause: "Pausing: its state is being saved", resume: "Queued again" }[name] ?? name);
    } catch (err) {
      this.#problem(err);
    }
    this.#drawHead();
  }

  /** @param {unknown} err */
  #problem(err) {
    if (!this.signal.aborted) say(err instanceof ApiError ? err.message : String(err), 8);
  }
}

/** @param {Job} job */
function waiting(job) {
  const parts = [job.queue_position ? `Position ${job.queue_position} in the queue: ${job.waiting_reason}` : job.waiting_reason];
  if (job.estimated_start) parts.push(`starts about ${moment(job.estimated_start)}`);
  const text = parts.join("; ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
