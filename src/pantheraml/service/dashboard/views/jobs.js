// @ts-check
// The queue, which an administrator may reorder, and everything that ever ran, with what it used.

import { ApiError, get, send } from "../api.js";
import { fill, h, say, table } from "../dom.js";
import { ago, jobName, moment, number, plural, tone, unit, UNKNOWN, whole } from "../format.js";
import { every } from "../live.js";

const PAGE = 100;
const ENDED = ["succeeded", "failed", "cancelled"];

/** @type {import("../main.js").View} */
export async function jobs(main, { signal, may, query }) {
  const search = h("input", { type: "search", placeholder: "Name, model, id, user or metadata", "aria-label": "Find jobs", value: query.get("search") ?? "" });
  const state = h("select", { "aria-label": "State" }, [["", "All states"], ["active", "Not ended"], ...["succeeded", "failed", "cancelled", "paused"].map(name => [name, name])].map(([value, name]) => h("option", { value }, name)));
  const queue = h("div"), list = h("div"), usage = h("div"), compare = h("a", { class: "button", href: "#/compare" }, "Compare");
  const more = h("button", { type: "button", hidden: true }, "Older jobs");
  /** @type {Set<string>} */
  const chosen = new Set();
  /** @type {any[]} */
  let known = [];
  let rest = false;

  const draw = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (/** @type {any} */ job) => {
      const text = [jobName(job), job.model, job.id, job.organization_id, job.fine_tuned_model ?? "", ...Object.entries(job.metadata ?? {}).flat()].join(" ").toLowerCase();
      return words.every(word => text.includes(word)) && (state.value === "" || (state.value === "active" ? !ENDED.includes(job.state) : job.state === state.value));
    };
    const found = known.filter(fits);
    const box = (/** @type {any} */ job) => h("input", {
      type: "checkbox", "aria-label": `Compare ${jobName(job)}`, checked: chosen.has(job.id), data: { focus: `box-${job.id}` },
      on: { change: (/** @type {Event} */ event) => { if (/** @type {HTMLInputElement} */ (event.target).checked) chosen.add(job.id); else chosen.delete(job.id); mark(); } },
    });
    const rows = found.map(job => [
      box(job), h("a", { href: `#/job/${job.id}`, data: { focus: job.id } }, jobName(job)), h("span", { class: `pill ${tone(job.state)}` }, job.state), job.model, job.organization_id,
      job.gpu_hours ? number(job.gpu_hours, 3) : job.cpu_slot_hours ? `${number(job.cpu_slot_hours, 3)} (CPU)` : UNKNOWN,
      job.energy_joules === null ? UNKNOWN : unit(job.energy_joules / 3.6e6, "kWh"), number(job.cost, 3), ago(job.created_at),
    ]);
    fill(list, rows.length
      ? h("div", { class: "card scroll" }, table("Jobs", ["Select", "Job", "State", "Model", "User", "Device hours", "Energy", "Cost", "Created"], rows, { numbers: [5, 6, 7], optional: [5, 6, 7], cards: true }))
      : h("div", { class: "card empty" }, rest ? `None of the newest ${known.length} jobs fits that; older ones may.` : known.length ? "No job fits that." : "No job yet."));
    more.hidden = !rest;
  };
  const drawQueue = (/** @type {any} */ entries) => fill(queue, queueTable(entries, may("admin"), drawQueue));
  const mark = () => {
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
    compare.href = `#/compare?jobs=${[...chosen].join(",")}`;
  };
  const fetchMore = async () => {
    const last = known.at(-1)?.id;
    const page = await get(`/v1/fine_tuning/jobs?limit=${PAGE}${last ? `&after=${last}` : ""}`, signal);
    known.push(...page.data);
    rest = page.has_more;
    draw();
  };
  search.addEventListener("input", draw);
  state.addEventListener("change", draw);
  more.addEventListener("click", () => void fetchMore());

  const page = [h("div", { class: "head" }, h("h1", {}, "Jobs"), h("div", { class: "actions" }, compare, may("submit") && h("a", { class: "button main", href: "#/new" }, "New job"))),
    h("h2", {}, "Queue"), queue, h("h2", {}, "History"),
    h("div", { class: "controls" }, h("div", { style: { flex: "1 1 220px" } }, search), h("div", {}, state)), list, h("p", {}, more),
    h("h2", {}, "Usage by user"), usage];
  await fetchMore();
  await every(4, signal, async () => {
    const [waiting, newest, used] = await Promise.all([get("/v1/queue", signal), get(`/v1/fine_tuning/jobs?limit=${PAGE}`, signal), get("/v1/usage", signal)]);
    known = [...newest.data, ...known.filter(job => !newest.data.some((/** @type {any} */ each) => each.id === job.id))];
    drawQueue(waiting);
    fill(usage, usageTable(used));
    draw();
    if (!list.isConnected && !signal.aborted) fill(main, page); // whole at once, so that nothing moves
  });
}

/** @param {any} queue @param {boolean} mayMove @param {(queue: any) => void} onMoved */
function queueTable(queue, mayMove, onMoved) {
  const entries = queue.data;
  if (!entries.length) return h("div", { class: "card empty" }, "No job is waiting.");
  const move = async (/** @type {string} */ job, /** @type {string | null} */ before) => {
    try { onMoved(await send("POST", "/v1/queue/move", { job, before })); say("Moved"); }
    catch (err) { say(err instanceof ApiError ? err.message : String(err), 6); }
  };
  const button = (/** @type {string} */ title, /** @type {string} */ name, /** @type {any} */ entry, /** @type {boolean} */ can, /** @type {string | null} */ before) =>
    h("button", { type: "button", class: "small", disabled: !can, "aria-label": `${name} ${entry.job}`, data: { focus: `${name}-${entry.job}` }, on: { click: () => void move(entry.job, before) } }, title);
  const rows = entries.map((/** @type {any} */ entry, /** @type {number} */ index) => [
    whole(entry.position), entry.job ? h("a", { href: `#/job/${entry.job}` }, jobName({ id: entry.job, model: entry.model, user_provided_suffix: entry.suffix })) : h("span", { class: "soft" }, "another user's"),
    entry.user ?? "", whole(entry.devices), entry.waiting_reason, entry.estimated_start === null ? UNKNOWN : moment(entry.estimated_start),
    ...(mayMove ? [entry.job && [button("↑", "Move up", entry, index > 0, entries[index - 1]?.job), " ", button("↓", "Move down", entry, index < entries.length - 1, entries[index + 2]?.job ?? null)]] : []),
  ]);
  return h("div", { class: "card scroll" }, table("Queue", ["#", "Job", "User", "Devices", "Why it waits", "Starts about", ...(mayMove ? [""] : [])], rows, { numbers: [3], optional: [5], cards: true }));
}

/** @param {any} used */
function usageTable(used) {
  if (!used.data.length) return h("div", { class: "card empty" }, "Nothing has been used yet.");
  const rows = used.data.map((/** @type {any} */ each) => [
    each.user, plural(each.jobs, "job"), number(each.gpu_hours, 3), number(each.cpu_slot_hours, 3),
    each.energy_joules === null ? UNKNOWN : unit(each.energy_joules / 3.6e6, "kWh"), number(each.cost, 3),
  ]);
  return h("div", {}, h("div", { class: "card scroll" }, table("Usage by user", ["User", "Jobs", "GPU-hours", "CPU slot hours", "Energy", "Cost"], rows, { numbers: [2, 3, 4, 5], optional: [4, 5], cards: true })),
    used.price_per_gpu_hour === null && used.data.some((/** @type {any} */ each) => each.gpu_hours > 0) && h("p", { class: "soft small" }, "No cost: the service was started without --price-per-gpu-hour."));
}
