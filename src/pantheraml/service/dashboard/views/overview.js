// @ts-check
// What the devices do, what runs and learns, what waits and why, and what went wrong.

import { get, jobPath } from "../api.js";
import { sparkline } from "../chart.js";
import { fill, h, meter, table } from "../dom.js";
import { ago, deviceNames, duration, jobName, moment, number, plural, size, tone, unit, UNKNOWN, whole } from "../format.js";
import { every } from "../live.js";

const SECONDS = 2;
const POINTS = 60;
const INCIDENTS = 6;
const HEALTH = /** @type {Record<string, string>} */ ({ ok: "healthy", warn: "warning", fail: "not healthy" });

/** @type {Map<string, { steps: number[], losses: number[] }>} losses of running jobs, for their sparklines */
const learned = new Map();

/** @type {import("../main.js").View} */
export async function overview(main, { signal, may }) {
  const head = h("p", { class: "soft", role: "status" });
  const devices = h("div"), running = h("div"), queue = h("div"), incidents = h("div");
  let models = /** @type {number | null} */ (null);
  await every(SECONDS, signal, async () => {
    const now = await get("/v1/overview", signal);
    models ??= (await get("/v1/models", signal)).data.filter((/** @type {any} */ each) => each.owned_by === "pantheraml").length;
    await learn(now.running, signal);
    if (signal.aborted) return false;
    if (!head.isConnected) {
      fill(main, h("div", { class: "head" }, h("h1", {}, "Overview"), h("div", { class: "actions" }, may("submit") && h("a", { class: "button main", href: "#/new" }, "New job"))),
        head, h("h2", {}, "Devices"), devices, h("h2", {}, "Running"), running, h("h2", {}, "Queue"), queue, h("h2", {}, "Incidents"), incidents);
    }
    fill(head, summary(now));
    fill(devices, devicesPart(now));
    fill(running, runningPart(now, models, may("submit")));
    fill(queue, queuePart(now));
    fill(incidents, incidentsPart(now));
    return true;
  });
}

/** @param {any} now */
function summary(now) {
  const busy = now.devices.filter((/** @type {any} */ each) => each.in_use).length, gpus = now.devices[0]?.kind === "gpu";
  const sick = now.devices.filter((/** @type {any} */ each) => each.health && each.health !== "ok").length;
  const parts = [`${busy} of ${plural(now.devices.length, gpus ? "GPU" : "CPU slot")} in use`, `${plural(now.running.length, "job")} running`, `${now.queued} waiting`];
  if (sick) parts.push(`${plural(sick, "GPU")} not healthy`);
  return parts.join(" · ");
}

/** @param {any} now */
function devicesPart(now) {
  const gpus = now.devices.filter((/** @type {any} */ each) => each.kind === "gpu");
  return gpus.length ? h("div", { class: "grid" }, gpus.map((/** @type {any} */ gpu) => gpuTile(gpu, now))) : hostTile(now);
}

/** @param {any} gpu @param {any} now */
function gpuTile(gpu, now) {
  const used = gpu.memory_used_bytes, total = gpu.memory_total_bytes;
  const kind = { ok: "good", warn: "warn", fail: "bad" }[/** @type {string} */ (gpu.health)] ?? "";
  const hot = (gpu.temperature_celsius ?? 0) >= 85;
  return h("article", { class: "card", "aria-label": gpu.device },
    h("div", { class: "row" }, h("h3", {}, `GPU ${gpu.device.slice(4)}`), h("span", { class: `pill ${kind}` }, HEALTH[gpu.health] ?? "health not known")),
    h("p", { class: "soft small" }, gpu.name),
    h("div", { class: "row small" }, h("span", {}, "Utilization"), h("span", { class: "number" }, unit(gpu.utilization_percent, "%"))),
    meter((gpu.utilization_percent ?? 0) / 100, `Utilization of ${gpu.device}`),
    h("div", { class: "row small" }, h("span", {}, "Memory"), h("span", { class: "number" }, `${size(used)} of ${size(total)}`)),
    meter(used && total ? used / total : 0, `Memory of ${gpu.device}`, total && used / total > 0.95 ? "warn" : ""),
    h("div", { class: "row small soft" }, h("span", { class: hot ? "pill warn" : "number" }, unit(gpu.temperature_celsius, "°C")), h("span", { class: "number" }, unit(gpu.power_watts, "W"))),
    h("p", { class: "small" }, holder(gpu, now)),
    gpu.health_reasons.length > 0 && h("p", { class: `alert small ${gpu.health === "fail" ? "" : "warn"}` }, gpu.health_reasons.join("; ")));
}

/** Who uses a device. @param {any} device @param {any} now */
function holder(device, now) {
  if (!device.in_use) return h("span", { class: "soft" }, "Free");
  const free = device.jobs_at_most - device.holders.length;
  return [...device.holders.flatMap((/** @type {any} */ each, /** @type {number} */ place) => [place ? ", " : "", ...oneHolder(each, device, now)]),
    free > 0 && h("span", { class: "soft" }, ` · room for ${free} more`)];
}

/** @param {any} each @param {any} device @param {any} now */
function oneHolder(each, device, now) {
  if (!each.job) return ["In use by another user"];
  const job = now.running.find((/** @type {any} */ one) => one.job === each.job);
  return [h("a", { href: `#/job/${each.job}`, data: { focus: `device-${device.device}-${each.job}` } }, job ? nameOf(job) : each.job), h("span", { class: "soft" }, each.user === "local" ? "" : ` · ${each.user}`)];
}

/** @param {any} now */
function hostTile(now) {
  const { host } = now, used = host.ram_used_bytes, total = host.ram_total_bytes;
  return h("div", { class: "grid wide" },
    h("article", { class: "card", "aria-label": "This machine" },
      h("div", { class: "row" }, h("h3", {}, "No GPU: jobs run on the CPU"), h("span", { class: "pill" }, plural(host.cpu_count, "core"))),
      h("p", { class: "soft small" }, sentence(host.note ?? "")),
      h("div", { class: "row small" }, h("span", {}, "CPU"), h("span", { class: "number" }, unit(host.cpu_percent, "%", 2))),
      meter((host.cpu_percent ?? 0) / 100, "CPU of this machine"),
      h("div", { class: "row small" }, h("span", {}, "Memory"), h("span", { class: "number" }, `${size(used)} of ${size(total)}`)),
      meter(used && total ? used / total : 0, "Memory of this machine")),
    h("article", { class: "card", "aria-label": "Slots" },
      h("h3", {}, "Slots for CPU processes"),
      h("p", { class: "soft small" }, "Each process of a job takes one."),
      now.devices.map((/** @type {any} */ slot) => h("div", { class: "row small" }, h("span", {}, `Slot ${slot.device.slice(4)}`), h("span", {}, holder(slot, now))))));
}

/** @param {any} now @param {number | null} models @param {boolean} may */
function runningPart(now, models, may) {
  if (now.running.length) return h("div", { class: "grid wide" }, now.running.map(runningCard));
  const message = models === 0
    ? ["No model can be tuned yet: put the folder of one (config.json and safetensors) into the folder that ", h("code", {}, "--models-dir"), " names."]
    : now.queued ? "Nothing runs at the moment; the queue below says why." : "No job runs. Choose a model and a file of examples, and watch it learn.";
  return h("div", { class: "card empty" }, h("p", {}, message), may && models !== 0 && h("p", {}, h("a", { class: "button", href: "#/new", data: { focus: "first" } }, "Start a job")));
}

/** @param {any} job */
function runningCard(job) {
  const history = learned.get(job.job);
  const losses = history?.losses ?? [];
  return h("article", { class: "card", "aria-label": `Job ${job.job}` },
    h("div", { class: "row" }, h("h3", {}, h("a", { href: `#/job/${job.job}`, data: { focus: job.job } }, nameOf(job))), h("span", { class: `pill ${tone(job.state)}` }, job.state)),
    h("p", { class: "soft small" }, `${job.user === "local" ? "" : `${job.user}, `}${deviceNames(job.devices)}`),
    meter(job.progress ?? 0, "Progress"),
    h("div", { class: "row small" },
      h("span", {}, job.step === null ? "loading the model and the data" : `step ${whole(job.step)} of ${whole(job.total_steps)}`),
      h("span", { class: "number" }, job.seconds_left === null ? "" : job.step >= job.total_steps ? "finishing" : `${duration(Math.max(1, job.seconds_left))} left`)),
    losses.length > 1 ? sparkline(losses, `Loss from ${number(losses[0])} to ${number(losses.at(-1))}`) : h("div", { class: "spark" }),
    h("div", { class: "row small" }, h("span", {}, "Loss ", h("b", { class: "number" }, number(job.train_loss))), h("span", { class: "soft number" }, job.tokens_per_second === null ? "" : `${whole(job.tokens_per_second)} tokens/s`)),
    job.alerts.map((/** @type {string} */ alert) => h("p", { class: "alert warn small" }, `Alert: ${alert.replace("alert.", "").replaceAll("_", " ")}`)));
}

/** @param {any} now */
function queuePart(now) {
  if (!now.queue.length) return h("div", { class: "card empty" }, "No job is waiting.");
  const rows = now.queue.map((/** @type {any} */ entry) => [
    whole(entry.position),
    entry.job ? h("a", { href: `#/job/${entry.job}`, data: { focus: `queue-${entry.job}` } }, nameOf(entry)) : h("span", { class: "soft" }, "another user's"),
    entry.waiting_reason, entry.estimated_start === null ? UNKNOWN : moment(entry.estimated_start), ago(entry.queued_at),
  ]);
  const more = now.queued - now.queue.length;
  return h("div", { class: "card scroll" }, table("Jobs that wait", ["#", "Job", "Why it waits", "Starts about", "Queued"], rows, { optional: [3], cards: true }),
    more > 0 && h("p", { class: "soft small" }, `and ${whole(more)} more`));
}

/** @param {any} now */
function incidentsPart(now) {
  if (!now.incidents.length) return h("div", { class: "card empty" }, "No warnings and no errors.");
  const judged = new Set(now.incidents.filter((/** @type {any} */ each) => each.kind === "verdict").map((/** @type {any} */ each) => `${each.job} ${each.step}`));
  const told = now.incidents.filter((/** @type {any} */ each) => each.kind !== "incident" || !judged.has(`${each.job} ${each.step}`)); // the verdict names the step
  const rows = told.slice(0, INCIDENTS).map((/** @type {any} */ each) => [
    h("span", { class: `pill ${each.level === "error" ? "bad" : "warn"}` }, each.level === "error" ? "error" : "warning"),
    each.message, h("a", { href: `#/job/${each.job}?tab=events`, data: { focus: each.id } }, nameOf(each)), ago(each.created_at),
  ]);
  return h("div", { class: "card scroll" }, table("Incidents", ["Level", "What happened", "Job", "When"], rows, { cards: true }),
    told.length > INCIDENTS && h("p", { class: "soft small" }, "Older ones are on the pages of their jobs, under Events."));
}

/** Keep the losses of running jobs. @param {any[]} running @param {AbortSignal} signal */
async function learn(running, signal) {
  for (const name of learned.keys()) if (!running.some(job => job.job === name)) learned.delete(name);
  for (const job of running) {
    let known = learned.get(job.job);
    if (!known) {
      const { metrics } = await get(`${jobPath(job.job)}/curves?points=${POINTS}`, signal);
      known = { steps: metrics.train_loss?.steps ?? [], losses: metrics.train_loss?.values ?? [] };
      learned.set(job.job, known);
    }
    if (job.step === null || job.train_loss === null || job.step === known.steps.at(-1)) continue;
    known.steps.push(job.step);
    known.losses.push(job.train_loss);
    if (known.steps.length > 2 * POINTS) for (const list of [known.steps, known.losses]) list.splice(0, list.length, ...list.filter((_, index) => index % 2 === 1));
  }
}

/** @param {{ job: string, model: string, suffix: string | null }} entry */
function nameOf({ job, model, suffix }) {
  return jobName({ id: job, model, user_provided_suffix: suffix });
}

/** @param {string} text */
function sentence(text) {
  return text && `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}
