// @ts-check
// What the model writes before and after: the same prompts to the base model and to what the job has made of it.

import { get, jobPath, send } from "../api.js";
import { fill, h } from "../dom.js";
import { ago } from "../format.js";

/** @typedef {{ line: number, prompt: string, expected: string, before: string, after: string }} Sample */

/** @param {import("../api.js").Job} job @param {boolean} may @param {AbortSignal} signal */
export async function samplesPart(job, may, signal) {
  if (!job.fine_tuned_model) {
    const ended = ["failed", "cancelled"].includes(job.state);
    return h("div", { class: "card empty" }, ended ? "This job has made no model." : "When the job has succeeded, the base model and the new one can answer the same prompts here.");
  }
  const box = h("div", { class: "stack" }), path = `${jobPath(job.id)}/samples`;
  const show = (/** @type {any} */ found) => fill(box, head(found, ask), found.data.map(card));
  const ask = may ? async () => {
    fill(box, h("div", { class: "card empty", role: "status" }, "The base model answers first, then the new one; to load a model takes a while."));
    try {
      show(await send("POST", path, {}, signal));
    } catch (err) {
      if (!signal.aborted) fill(box, h("div", { class: "alert", role: "alert" }, err instanceof Error ? err.message : String(err)), h("div", {}, h("button", { type: "button", on: { click: () => void ask?.() } }, "Try again")));
    }
  } : null;
  show(await get(path, signal));
  return box;
}

/** @param {any} found @param {(() => Promise<void>) | null} ask */
function head(found, ask) {
  const button = (/** @type {string} */ title, kind = "") => ask && h("button", { type: "button", class: kind, data: { focus: "samples" }, on: { click: () => void ask() } }, title);
  if (found.created_at === null) {
    return h("div", { class: "card empty" }, h("p", {}, "Give a few rows of the data to the base model and to the new one, and see what this job has changed."),
      ask ? h("p", {}, button("Show before and after", "main")) : h("p", {}, "Nobody has asked for that yet, and your key may not."));
  }
  const source = found.trained_on ? "the training data, which the model has seen" : "the evaluation data, which the model has not been trained on";
  return h("div", { class: "row" }, h("p", { class: "soft small sub" }, `First rows of ${found.filename}: ${source}. The likeliest answer each time, made ${ago(found.created_at)}.`), button("Again", "small"));
}

/** @param {string} text */
const said = text => h("div", { class: "said", tabindex: text.length > 400 ? 0 : null }, text.trim() || h("span", { class: "soft" }, "nothing"));

/** @param {Sample} sample */
function card(sample) {
  const answer = (/** @type {string} */ title, /** @type {string} */ text, same = false) =>
    h("div", {}, h("div", { class: "row small soft" }, h("span", {}, title), same && h("span", { class: "pill good" }, "as expected")), said(text));
  const fits = (/** @type {string} */ text) => text.trim() !== "" && text.trim() === sample.expected.trim();
  return h("article", { class: "card stack", "aria-label": `Line ${sample.line}` },
    h("div", {}, h("div", { class: "small soft" }, `Prompt, line ${sample.line}`), said(sample.prompt)),
    h("div", { class: "answers" }, answer("Before", sample.before, fits(sample.before)), answer("After", sample.after, fits(sample.after)), answer("In the data", sample.expected)));
}
