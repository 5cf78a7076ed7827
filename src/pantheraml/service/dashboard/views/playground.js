// @ts-check
// Base model and fine-tuned model side by side, on the same words.

import { ApiError, get, request } from "../api.js";
import { field, fill, h } from "../dom.js";
import { duration, number } from "../format.js";
import { messages } from "../live.js";

/** @type {import("../main.js").View} */
export async function playground(main, { query, signal }) {
  const models = (await get("/v1/models", signal)).data;
  const bases = models.filter((/** @type {any} */ each) => each.owned_by === "pantheraml").map((/** @type {any} */ each) => each.id);
  const tuned = models.filter((/** @type {any} */ each) => each.owned_by !== "pantheraml").map((/** @type {any} */ each) => each.id).reverse();
  const wanted = query.get("model") ?? tuned[0] ?? "";
  const baseOf = (/** @type {string} */ name) => (name.startsWith("ft:") ? name.split(":")[1] ?? "" : "");
  const choose = (/** @type {string} */ title, /** @type {string[]} */ names, /** @type {string} */ value) =>
    h("select", { "aria-label": title }, h("option", { value: "" }, names.length ? "None" : "There is none"), names.map(name => h("option", { value: name, selected: name === value }, name)));
  const left = new Side("Base", choose("Base model", bases, bases.includes(baseOf(wanted)) ? baseOf(wanted) : bases[0] ?? ""));
  const right = new Side("Fine-tuned", choose("Fine-tuned model", tuned, wanted));
  right.model.addEventListener("change", () => { if (bases.includes(baseOf(right.model.value))) left.model.value = baseOf(right.model.value); });
  const system = h("textarea", { rows: 2 }), prompt = h("textarea", { rows: 4, required: true });
  const tokens = h("input", { type: "number", min: 1, max: 4096, value: 128 }), temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: 0 });
  const go = h("button", { class: "main" }, "Send"), stop = h("button", { type: "button", disabled: true }, "Stop");
  let asking = new AbortController();
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    if (!prompt.value.trim() || go.disabled) { prompt.focus(); return; }
    asking = new AbortController();
    go.disabled = true;
    stop.disabled = false;
    const body = {
      messages: [...(system.value.trim() ? [{ role: "system", content: system.value }] : []), { role: "user", content: prompt.value }],
      max_completion_tokens: Number(tokens.value), temperature: Number(temperature.value), stream: true, stream_options: { include_usage: true },
    };
    const both = AbortSignal.any([signal, asking.signal]);
    await Promise.all([left, right].map(side => side.ask(body, both)));
    go.disabled = false;
    stop.disabled = true;
  };
  stop.addEventListener("click", () => asking.abort());
  prompt.addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) prompt.form?.requestSubmit(); });
  fill(main, h("h1", {}, "Playground"), h("p", { class: "soft sub" }, "The same message to the model before and after fine-tuning. A job's page shows under Before and after how both answer its own data."),
    h("form", { class: "card stack", on: { submit } }, field("System message (optional)", system), field("Message", prompt, "Ctrl + Enter sends it."),
      h("div", { class: "fields" }, field("Most tokens of an answer", tokens), field("Temperature", temperature, "0: always the likeliest token")), h("div", { class: "controls" }, go, stop)),
    h("div", { class: "grid wide", style: { "margin-top": "14px" } }, left.element, right.element));
  if (!tuned.length) right.tell("No job has made a model yet.");
}

class Side {
  /** @param {string} title @param {HTMLSelectElement} model */
  constructor(title, model) {
    this.model = model;
    this.answer = h("div", { class: "answer", "aria-live": "polite", data: { side: title } });
    this.tell("Its answer appears here.");
    this.note = h("p", { class: "soft small number" });
    this.element = h("section", { class: "card stack", "aria-label": title }, h("div", { class: "row" }, h("h2", { class: "title" }, title), h("div", { style: { "min-width": "0", flex: "0 1 70%" } }, model)), this.answer, this.note);
  }

  /** @param {string} note in place of an answer */
  tell(note) {
    fill(this.answer, h("span", { class: "soft" }, note));
  }

  /** @param {any} body @param {AbortSignal} signal */
  async ask(body, signal) {
    if (!this.model.value) { this.tell("No model is chosen."); return; }
    const begin = performance.now();
    let first = 0;
    this.tell("Loading the model, then answering");
    this.note.textContent = "";
    const text = document.createTextNode("");
    try {
      const response = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify({ ...body, model: this.model.value }), headers: { "Content-Type": "application/json" }, signal });
      for await (const { data } of messages(response)) {
        if (data?.error) throw new ApiError(500, data.error.message);
        const piece = data?.choices?.[0]?.delta?.content;
        if (piece) {
          if (!first) { first = performance.now(); fill(this.answer, text); }
          text.appendData(piece);
        }
        if (data?.usage) this.#told(data.usage.completion_tokens, begin, first);
      }
      if (!first) this.tell("An empty answer.");
    } catch (err) {
      if (signal.aborted) { this.note.textContent = "Stopped"; return; }
      const missing = err instanceof ApiError && err.status === 404 && err.code !== "model_not_found" && /not found/i.test(err.message);
      fill(this.answer, h("div", { class: "alert", role: "alert" }, missing ? "This service cannot generate: it has no chat endpoint." : err instanceof Error ? err.message : String(err)));
    }
  }

  /** @param {number} count @param {number} begin @param {number} first */
  #told(count, begin, first) {
    const seconds = (performance.now() - first) / 1000;
    this.note.textContent = first ? `${count} tokens · first after ${duration((first - begin) / 1000)}${count > 1 && seconds > 0 ? ` · ${number((count - 1) / seconds, 3)} tokens/s` : ""}` : `${count} tokens`;
  }
}
