// @ts-check
// Runs over each other, and where their configurations differ.

import { get, jobPath } from "../api.js";
import { Chart } from "../chart.js";
import { fill, h, table } from "../dom.js";
import { AXES, Figures, positions } from "../figures.js";
import { jobName, number, size, tone, UNKNOWN, whole } from "../format.js";
import { flat, shown } from "./job_parts.js";

const MOST = 6;
/** Differ between any two jobs, and say nothing. */
const DULL = new Set(["data.path", "data.eval_path", "train.seed"]);

/** @typedef {{ job: any, figures: Figures, config: any, color: string, data: string }} Run */

/** @type {import("../main.js").View} */
export async function compare(main, { query, signal }) {
  const chosen = (query.get("jobs") ?? "").split(",").filter(Boolean).slice(0, MOST);
  const all = (await get("/v1/fine_tuning/jobs?limit=200", signal)).data;
  const runs = await Promise.all(chosen.map(async (id, index) => {
    const [job, figures, { config }] = await Promise.all([get(jobPath(id), signal), new Figures(id).load(signal), get(`${jobPath(id)}/config`, signal)]);
    const file = await get(`/v1/files/${encodeURIComponent(job.training_file)}`, signal).catch(() => null); // perhaps deleted
    return /** @type {Run} */ ({ job, figures, config, color: `run${index}`, data: file ? `${file.filename} (${file.id.slice(-6)})` : job.training_file });
  }));
  const go = (/** @type {string[]} */ ids) => { location.hash = `#/compare?jobs=${ids.join(",")}`; };
  const others = all.filter((/** @type {any} */ job) => !chosen.includes(job.id));
  const add = h("select", { "aria-label": "Add a job", on: { change: () => add.value && go([...chosen, add.value]) } },
    h("option", { value: "" }, chosen.length < MOST ? "Add a job" : `At most ${MOST} jobs`), chosen.length < MOST && others.map((/** @type {any} */ job) => h("option", { value: job.id }, `${jobName(job)} (${job.state}, ${job.model})`)));
  const head = [h("div", { class: "head" }, h("h1", {}, "Compare")), all.length > 0 && h("div", { class: "controls" }, add)];
  if (!runs.length) {
    fill(main, head, h("div", { class: "card empty" }, all.length ? "Add two jobs or more: their curves are drawn over each other, with the settings that differ." : "There is no job yet."));
    return;
  }
  const axis = h("select", { "aria-label": "Over" }, Object.entries({ step: "steps", epoch: "epochs", tokens: "tokens", minutes: "time" }).map(([value, name]) => h("option", { value }, name)));
  const log = h("input", { type: "checkbox" }), smooth = h("input", { type: "checkbox", checked: true });
  const charts = { train_loss: new Chart("Training loss", { wide: true }), valid_loss: new Chart("Evaluation loss"), grad_norm: new Chart("Gradient norm"), tokens_per_second: new Chart("Tokens per second"), learning_rate: new Chart("Learning rate") };
  const draw = () => {
    const over = /** @type {import("../figures.js").Axis} */ (axis.value);
    for (const [name, chart] of Object.entries(charts)) {
      const lines = runs.map(({ job, figures, color }) => {
        const trace = (name === "train_loss" && smooth.checked && figures.trace(name).total >= 60 ? figures.smoothed.get(50) : undefined) ?? figures.trace(name);
        return { name: jobName(job), color, x: positions(trace, over), y: trace.values };
      });
      const known = lines.filter(line => line.y.length);
      const sentence = known.length ? `${known.map(line => `${line.name} ends at ${number(line.y.at(-1))}`).join("; ")}.` : "None of them has such figures.";
      chart.show({ x: AXES[over], lines, sentence, log: log.checked && name !== "tokens_per_second", zero: name === "tokens_per_second", ticks: name === "learning_rate" ? "~e" : undefined });
      chart.element.hidden = !known.length;
    }
  };
  for (const control of [axis, log, smooth]) control.addEventListener("change", draw);
  fill(main, head, runTable(runs, ids => go(ids)),
    h("div", { class: "controls" }, h("label", { class: "inline" }, "Over ", axis), h("label", { class: "inline" }, log, "Log scale"), h("label", { class: "inline" }, smooth, "Smooth the training loss")),
    h("div", { class: "charts" }, Object.values(charts).map(chart => chart.element)), h("h2", {}, "Settings that differ"), differences(runs));
  draw();
}

/** @param {Run[]} runs @param {(ids: string[]) => void} go */
function runTable(runs, go) {
  const best = Math.min(...runs.map(({ figures }) => figures.latest("valid_loss") ?? figures.latest("train_loss") ?? Infinity));
  const rows = runs.map(({ job, figures, color }) => {
    const loss = figures.latest("valid_loss") ?? figures.latest("train_loss");
    return [
      h("span", {}, h("span", { class: "swatch", style: { background: `var(--${color})` } }), h("a", { href: `#/job/${job.id}` }, jobName(job))),
      h("span", { class: `pill ${tone(job.state)}` }, job.state), whole(figures.step), number(figures.latest("train_loss")), number(figures.latest("valid_loss")),
      whole(figures.latest("tokens_per_second")), size(figures.latest("memory_bytes")), loss !== null && loss === best && runs.length > 1 ? h("span", { class: "pill good" }, "lowest loss") : "",
      h("button", { type: "button", class: "small", "aria-label": `Remove ${jobName(job)}`, on: { click: () => go(runs.map(run => run.job.id).filter(id => id !== job.id)) } }, "Remove"),
    ];
  });
  return h("div", { class: "card scroll" }, table("Runs", ["Run", "State", "Steps", "Training loss", "Evaluation loss", "Tokens/s", "Memory", "Best", ""], rows, { numbers: [2, 3, 4, 5, 6], cards: true }));
}

/** @param {Run[]} runs */
function differences(runs) {
  const configs = runs.map(({ config, job, data }) => new Map([...flat(config).filter(([name]) => !DULL.has(name)), ["training data", data], ["model", job.model]]));
  const names = [...new Set(configs.flatMap(config => [...config.keys()]))];
  const rows = names.filter(name => new Set(configs.map(config => JSON.stringify(config.get(name) ?? null))).size > 1)
    .map(name => [h("span", { class: "mono" }, name), ...configs.map(config => (config.has(name) ? shown(config.get(name)) : UNKNOWN))]);
  if (runs.length < 2) return h("div", { class: "card empty" }, "Add another job to see what differs.");
  if (!rows.length) return h("div", { class: "card empty" }, "None: they differ by their seeds at most.");
  return h("div", { class: "card scroll" }, table("Settings that differ", ["Setting", ...runs.map(run => jobName(run.job))], rows));
}
