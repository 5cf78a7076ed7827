// @ts-check
// Parts of a job's page besides its charts: the plan, events, the log, files, the configuration.

import { get, jobPath, request } from "../api.js";
import { fill, h, table } from "../dom.js";
import { duration, moment, number, size, UNKNOWN, unit } from "../format.js";
import { every } from "../live.js";

const LOG_CHARACTERS = 2 ** 20;

/** @param {any} value */
export function shown(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? number(value, 6) : typeof value === "string" ? value : JSON.stringify(value);
}

const PART_COLORS = ["train", "run1", "run2", "run3", "run4", "run5", "faint", "soft"];

/** Predicted memory by its parts, in the room of a device. @param {any} plan */
export function memoryBar(plan) {
  const memory = plan?.prediction?.memory ?? null, whole = plan?.predicted_memory_bytes ?? null;
  if (!memory && whole === null) return h("p", { class: "soft small" }, `Memory: not predicted ${plan?.device === "cuda" ? "for this model and device" : "on CPUs"}.`);
  const parts = /** @type {[string, number][]} */ (Object.entries(memory?.parts ?? { predicted: whole })).filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
  const used = memory?.device_bytes ?? memory?.allocated_bytes ?? whole, capacity = memory?.capacity_bytes ?? null;
  const scale = Math.max(capacity ?? 0, used, parts.reduce((sum, [, bytes]) => sum + bytes, 0));
  const rest = used - parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  if (rest > 0 && memory) parts.push(["allocator and context", rest]);
  const color = (/** @type {number} */ index) => `var(--${PART_COLORS[index % PART_COLORS.length]})`;
  const fits = capacity === null ? null : used <= capacity;
  return h("div", {},
    h("div", { class: "row small" }, h("b", {}, "Memory per device"), h("span", { class: "number" }, capacity === null ? size(used) : `${size(used)} of ${size(capacity)}`)),
    h("div", { class: "stackbar", role: "img", "aria-label": `Predicted memory ${size(used)}: ${parts.map(([name, bytes]) => `${name} ${size(bytes)}`).join(", ")}` },
      parts.map(([, bytes], index) => h("i", { style: { width: `${(100 * bytes) / scale}%`, background: color(index) } }))),
    fits === false && h("p", { class: "alert small" }, "It does not fit."),
    h("ul", { class: "small", style: { "list-style": "none", padding: 0, margin: 0 } }, parts.map(([name, bytes], index) =>
      h("li", { class: "row" }, h("span", {}, h("span", { class: "swatch", style: { background: color(index) } }), name.replaceAll("_", " ")), h("span", { class: "number soft" }, size(bytes))))));
}

/** @param {any} plan */
export function planPart(plan) {
  const prediction = plan.prediction, seconds = prediction?.total_seconds ?? plan.predicted_seconds;
  const facts = [
    ["Device", `${plan.world_size} × ${plan.device === "cuda" ? "GPU" : "CPU process"}`], ["Precision", plan.precision],
    ["Batch", `${plan.global_batch_size} rows per step, ${plan.micro_batch_size} at a time`],
    ["Time of a step", duration(prediction?.step_seconds)], ["Whole run", duration(seconds)],
    ["Energy", unit(prediction?.energy_kwh, "kWh")], ["Cost", prediction?.dollars === null || prediction?.dollars === undefined ? UNKNOWN : `$${number(prediction.dollars, 3)}`],
  ].filter(([, value]) => value !== UNKNOWN);
  const unpredicted = seconds === null || seconds === undefined;
  const choices = plan.choices.map((/** @type {any} */ each) => [h("span", { class: "mono" }, each.name), shown(each.value), each.reason, each.automatic ? "planner" : "you"]);
  const others = (plan.alternatives ?? []).map((/** @type {any} */ each) => [each.name, each.fits === null ? UNKNOWN : each.fits ? "yes" : "no", duration(each.step_seconds), size(each.memory?.device_bytes), each.reason]);
  return h("div", { class: "stack" },
    h("div", { class: "grid wide" },
      h("div", { class: "card" }, h("dl", { class: "facts" }, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
        unpredicted && h("p", { class: "soft small" }, `Time: not predicted ${plan.device === "cuda" ? "for this model and device" : "on CPUs"}.`)),
      h("div", { class: "card" }, memoryBar(plan))),
    (plan.warnings ?? []).map((/** @type {string} */ text) => h("p", { class: "alert warn" }, text)),
    h("div", { class: "card scroll" }, table("Choices and reasons", ["Setting", "Value", "Why", "Chosen by"], choices, { cards: true })),
    others.length > 0 && h("h2", {}, "Plans that were not chosen"),
    others.length > 0 && h("div", { class: "card scroll" }, table("Alternatives", ["Plan", "Fits", "Step", "Memory", "Why not"], others, { cards: true })));
}

/** @param {any[]} events newest first */
export function eventsPart(events) {
  if (!events.length) return h("div", { class: "card empty" }, "Nothing has happened yet.");
  const kind = (/** @type {any} */ event) => (event.level === "error" ? "bad" : event.level === "warn" ? "warn" : "");
  const rows = events.map(event => [moment(event.created_at), h("span", { class: `pill ${kind(event)}` }, event.kind), h("div", {}, event.message, explanation(event))]);
  return h("div", { class: "card scroll" }, table("Events, the newest first", ["When", "Kind", "What"], rows, { cards: true }));
}

/** Tensor, rank and samples of a bad step. @param {any} event */
function explanation(event) {
  if (event.kind !== "verdict" && event.kind !== "incident") return null;
  const names = { anomaly: "anomaly", module: "module", tensor: "tensor", ranks: "ranks", samples: "samples", transient: "gone when repeated" };
  const known = Object.entries(names).filter(([key]) => ![null, undefined].includes(event.data[key]) && event.data[key].length !== 0);
  return known.length ? h("dl", { class: "facts small" }, known.flatMap(([key, name]) => [h("dt", {}, name), h("dd", { class: "mono" }, shown(event.data[key]))])) : null;
}

/**
 * The log, which follows while the job runs. @param {string} id @param {() => boolean} running @param {AbortSignal} signal
 */
export function logPart(id, running, signal) {
  const text = h("pre", { class: "log", role: "log", tabindex: 0, "aria-label": "Output of its processes" });
  const follow = h("input", { type: "checkbox", checked: true, id: "follow" });
  const note = h("span", { class: "soft small" });
  const decoder = new TextDecoder(); // a character may lie across two answers
  let at = -1; // bytes shown so far; -1: nothing yet
  void every(1.5, signal, async () => {
    const wasRunning = running();
    const range = at < 0 ? "bytes=-262144" : `bytes=${Math.max(0, at - 1)}-`; // one byte again: an empty range is an error
    try {
      const response = await request(`${jobPath(id)}/logs`, { headers: { Range: range }, signal });
      const bytes = new Uint8Array(await response.arrayBuffer());
      const [, from, to] = /bytes (\d+)-(\d+)\//.exec(response.headers.get("content-range") ?? "") ?? [null, "0", String(bytes.length - 1)];
      const fresh = at < 0 ? bytes : bytes.subarray(at > 0 ? 1 : 0);
      if (at < 0 && Number(from) > 0) note.textContent = "the newest lines; Files has all";
      at = Number(to) + 1;
      if (at === 0) note.textContent = running() ? "Its processes have written nothing yet." : "Its processes wrote nothing.";
      if (fresh.length) text.append(document.createTextNode(decoder.decode(fresh, { stream: true })));
      for (let length = text.textContent?.length ?? 0; length > LOG_CHARACTERS && text.childNodes.length > 1;) {
        length -= text.firstChild?.textContent?.length ?? 0;
        text.firstChild?.remove();
        note.textContent = "the newest lines; Files has all";
      }
      if (follow.checked && fresh.length) text.scrollTop = text.scrollHeight;
    } catch (err) {
      if (signal.aborted) return false;
      if (!(err instanceof Error && "status" in err && [404, 416].includes(/** @type {any} */ (err).status))) throw err;
      if (at < 0) note.textContent = running() ? "Its processes have written nothing yet." : "Its processes wrote nothing.";
    }
    if (at > 0 && note.textContent?.startsWith("Its")) note.textContent = "";
    return wasRunning;
  });
  return h("div", {}, h("div", { class: "controls" }, h("label", { class: "inline" }, follow, "Follow"), note), h("div", { class: "card" }, text));
}

/** @param {string} id @param {import("../api.js").Job} job @param {AbortSignal} signal */
export async function filesPart(id, job, signal) {
  const [artifacts, checkpoints] = await Promise.all([get(`${jobPath(id)}/artifacts`, signal), get(`${jobPath(id)}/checkpoints?limit=100`, signal)]);
  const results = await Promise.all(job.result_files.map(name => get(`/v1/files/${name}`, signal).catch(() => null)));
  const link = (/** @type {string} */ href, /** @type {string} */ name) => h("a", { href, download: name.split("/").at(-1) ?? name }, name);
  const rows = [
    ...results.filter(Boolean).map(file => [link(`/v1/files/${file.id}/content`, file.filename), "result", size(file.bytes)]),
    ...artifacts.data.map((/** @type {any} */ each) => [link(`${jobPath(id)}/artifacts/${each.name.split("/").map(encodeURIComponent).join("/")}`, each.name), each.name === "report.html" ? "report of the run" : "artifact", size(each.bytes)]),
    [link(`${jobPath(id)}/logs`, "worker.log"), "log", UNKNOWN],
  ];
  const saved = checkpoints.data.map((/** @type {any} */ each) => [String(each.step_number), number(each.metrics.train_loss), number(each.metrics.valid_loss), moment(each.created_at)]);
  return h("div", { class: "stack" },
    h("div", { class: "card scroll" }, table("Files", ["File", "Kind", "Size"], rows, { numbers: [2] })),
    saved.length > 0 && h("h2", {}, "Checkpoints"),
    saved.length > 0 && h("div", { class: "card scroll" }, table("Checkpoints", ["Step", "Training loss", "Evaluation loss", "Saved"], saved, { numbers: [0, 1, 2], cards: true })));
}

/** Keys of nested objects as dotted names. @param {any} value @param {string} [prefix] @returns {[string, any][]} */
export function flat(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[prefix, value]];
  return Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key));
}

/** @param {string} id @param {import("../api.js").Job} job @param {AbortSignal} signal */
export async function configPart(id, job, signal) {
  const { config } = await get(`${jobPath(id)}/config`, signal);
  const search = h("input", { type: "search", "aria-label": "Find a setting", placeholder: "Find a setting" });
  const body = h("div", { class: "card scroll" });
  const draw = () => {
    const found = flat(config).filter(([name, value]) => `${name} ${shown(value)}`.toLowerCase().includes(search.value.toLowerCase()));
    fill(body, found.length ? table("Configuration", ["Setting", "Value"], found.map(([name, value]) => [h("span", { class: "mono" }, name), shown(value)])) : h("p", { class: "empty" }, "No setting has that in its name or value."));
  };
  search.addEventListener("input", draw);
  draw();
  const pairs = Object.entries(job.metadata ?? {});
  return h("div", { class: "stack" },
    pairs.length > 0 && h("div", { class: "card scroll" }, table("Metadata", ["Metadata", "Value"], pairs)), search, body);
}
