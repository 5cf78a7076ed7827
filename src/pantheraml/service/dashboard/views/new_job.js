// @ts-check
// Put a job together: data, model, method. What the planner makes of it, and what the model would be trained on, follow
// as one types; nothing runs before one submits.

import { ApiError, get, jobPath, LostError, request, send, upload } from "../api.js";
import { field, fill, h, say, table } from "../dom.js";
import { duration, number, plural, size, UNKNOWN, whole } from "../format.js";
import { pause } from "../live.js";
import { memoryBar } from "./job_parts.js";

const METHODS = [["lora", "LoRA: trains a small adapter"], ["qlora", "QLoRA: LoRA on a 4-bit model, least memory"], ["dora", "DoRA: LoRA with magnitudes"], ["full", "Full: trains all weights"]];
const PRECISIONS = ["auto", "bf16", "fp16", "fp32", "fp8", "int8", "nf4"];
const TYPING_SECONDS = 0.4;
const LINES = [
  '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}',
  '{"prompt": "2 + 2 = ", "completion": "4"}',
  '{"instruction": "Add the numbers.", "input": "2, 2", "output": "4"}',
  '{"text": "Two and two are four."}',
];
/** Keys of `pantheraml.config` that the form has fields for. */
const OWN = ["method.kind", "method.rank", "data.seq_len", "data.packing", "model.precision", "train.eval_every_steps"];

/** @type {import("../main.js").View} */
export async function newJob(main, place) {
  const from = place.query.get("from");
  const [models, files, earlier] = await Promise.all([
    get("/v1/models", place.signal), get("/v1/files?limit=500", place.signal),
    from ? get(`${jobPath(from)}/config`, place.signal) : null,
  ]);
  const names = models.data.filter((/** @type {any} */ each) => each.owned_by === "pantheraml").map((/** @type {any} */ each) => each.id);
  new Form(main, place, names, files.data.filter((/** @type {any} */ each) => each.purpose === "fine-tune"), earlier?.request ?? null);
}

class Form {
  /**
   * @param {HTMLElement} main @param {import("../main.js").Place} place @param {string[]} models @param {any[]} files
   * @param {any} earlier the request of the job that is duplicated
   */
  constructor(main, place, models, files, earlier) {
    this.place = place;
    this.files = files;
    this.earlier = earlier;
    const config = earlier?.pantheraml.config ?? {}, hyper = earlier?.hyperparameters ?? {};
    const changed = { on: { input: () => this.#changed() } };
    const count = (/** @type {string} */ name, /** @type {any} */ value, more = {}) => h("input", { type: "number", name, value: value ?? "", min: 1, step: 1, ...changed, ...more });
    const choose = (/** @type {string} */ name, /** @type {string[][]} */ options, /** @type {any} */ value) =>
      h("select", { name, ...changed }, options.map(([key, title]) => h("option", { value: key, selected: key === (value ?? "") }, title ?? key)));
    this.model = choose("model", [...(models.length === 1 ? [] : [["", "Choose a model"]]), ...models.map(name => [name, name])], earlier?.model);
    this.training = choose("training_file", [], null);
    this.validation = choose("validation_file", [], null);
    this.#listFiles(earlier?.training_file ?? "", earlier?.validation_file ?? "");
    this.method = choose("method", METHODS, config.method?.kind ?? "lora");
    this.rank = count("rank", config.method?.rank, { placeholder: "16" });
    this.epochs = count("epochs", hyper.n_epochs, { placeholder: "3" });
    this.batch = count("batch", hyper.batch_size, { placeholder: "16, or all rows" });
    this.rate = count("rate", hyper.learning_rate_multiplier, { step: "any", min: 0, placeholder: "1" });
    this.length = count("length", config.data?.seq_len, { min: 8, placeholder: "2048, or what the model can" });
    this.precision = choose("precision", PRECISIONS.map(name => [name, name]), config.model?.precision ?? "auto");
    this.packing = h("input", { type: "checkbox", name: "packing", checked: config.data?.packing === true, id: "packing", ...changed });
    this.evals = count("evals", config.train?.eval_every_steps, { placeholder: "at the end" });
    this.processes = count("processes", earlier?.pantheraml.processes, { placeholder: "chosen by the planner" });
    this.suffix = h("input", { name: "suffix", maxlength: 64, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*", placeholder: "first-try", value: earlier?.suffix ? `${earlier.suffix}-2`.slice(0, 64) : "", ...changed });
    this.seed = count("seed", earlier?.seed, { min: 0, placeholder: "random" });
    this.priority = count("priority", null, { min: -100, max: place.may("admin") ? 100 : 0, placeholder: "0" });
    this.hold = h("input", { type: "checkbox", name: "hold", id: "hold" });
    const rest = without(config, OWN);
    this.more = h("textarea", { name: "more", rows: 4, spellcheck: "false", class: "mono", placeholder: '{"train": {"warmup_steps": 10}}', ...changed }, Object.keys(rest).length ? JSON.stringify(rest, null, 2) : "");
    this.uploadNote = h("div", { class: "small", role: "status" });
    this.planBox = h("div", { class: "stack", "aria-live": "polite" });
    this.preview = h("div", {});
    this.problem = h("div", { class: "alert", role: "alert", hidden: true });
    this.submit = h("button", { class: "main", disabled: true }, "Start the job");
    this.typing = new AbortController();
    /** @type {string} what the preview shows */
    this.previewed = "";
    this.key = "";
    this.#draw(main, earlier, models);
    this.#changed();
  }

  /** @param {HTMLElement} main @param {any} earlier @param {string[]} models */
  #draw(main, earlier, models) {
    const drop = this.#drop();
    const form = h("form", { class: "stack", novalidate: true, on: { submit: (/** @type {Event} */ event) => { event.preventDefault(); void this.#send(); } } },
      models.length === 0 && h("div", { class: "alert warn" }, "There is no model that can be tuned. Put the folder of one (config.json and safetensors) into the folder that --models-dir names."),
      h("fieldset", { class: "card stack" }, h("legend", { class: "only-read" }, "Data and model"), h("h2", { class: "title" }, "1. Data and model"),
        field("Model", this.model), drop, h("div", { class: "fields two" }, field("Training data", this.training), field("Evaluation data (optional)", this.validation))),
      h("fieldset", { class: "card stack" }, h("legend", { class: "only-read" }, "Method"), h("h2", { class: "title" }, "2. Method"),
        h("div", { class: "fields" }, field("Method", this.method), field("Epochs", this.epochs), field("Rows per step", this.batch), field("Name (optional)", this.suffix, "Part of the new model's name")),
        h("details", { open: earlier !== null }, h("summary", {}, "More settings"),
          h("div", { class: "fields", style: { "margin-top": "12px" } },
            field("Learning rate factor", this.rate, "Times 2e-4"), field("Adapter rank", this.rank), field("Most tokens of a sequence", this.length),
            field("Precision", this.precision), field("Steps between evaluations", this.evals), field("GPUs or processes", this.processes), field("Seed", this.seed),
            field("Priority", this.priority, this.place.may("admin") ? undefined : "Above 0: administrators only")),
          h("div", { class: "controls" }, h("label", { class: "inline", for: "packing" }, this.packing, "Pack short rows into one sequence"), h("label", { class: "inline", for: "hold" }, this.hold, "Submit on hold")),
          field("Other settings (JSON)", this.more, h("span", {}, "Keys of the configuration, such as ", h("code", {}, "train"), ", ", h("code", {}, "stability"), ", ", h("code", {}, "checkpoint"), ".")))),
      this.problem, h("div", {}, this.submit));
    fill(main, h("h1", {}, earlier ? "Duplicate a job, with changes" : "New job"),
      h("p", { class: "soft sub" }, "Choose a model and examples. The plan beside shows what will happen before anything runs."),
      h("div", { class: "split" }, form, h("aside", { class: "card stack" }, h("h2", { style: { margin: 0 } }, "Plan"), this.planBox)),
      h("h2", {}, "What is trained"), this.preview);
  }

  #drop() {
    const input = h("input", { type: "file", accept: ".jsonl", class: "only-read", id: "upload", tabindex: -1 });
    const box = h("div", { class: "drop" }, h("p", {}, "Drop a .jsonl file here, or"),
      h("button", { type: "button", on: { click: () => input.click() } }, "Choose a file"), h("label", { class: "only-read", for: "upload" }, "Upload training data"), input,
      h("p", { class: "small" }, "One example a line: messages, prompt and completion, instruction and output, or text."),
      h("details", {}, h("summary", {}, "What a line looks like"), h("pre", { class: "examples mono", tabindex: 0, "aria-label": "A line of each kind" }, LINES.join("\n"))), this.uploadNote);
    input.addEventListener("change", () => { const file = input.files?.[0]; if (file) void this.#upload(file); input.value = ""; });
    box.addEventListener("dragover", event => { event.preventDefault(); box.classList.add("over"); });
    box.addEventListener("dragleave", () => box.classList.remove("over"));
    box.addEventListener("drop", event => { event.preventDefault(); box.classList.remove("over"); const file = event.dataTransfer?.files[0]; if (file) void this.#upload(file); });
    return box;
  }

  /** @param {File} file */
  async #upload(file) {
    fill(this.uploadNote, `Sending ${file.name}`);
    try {
      const added = await upload(file, share => fill(this.uploadNote, share < 1 ? `Sending ${file.name}: ${Math.round(100 * share)} %` : `Checking every row of ${file.name}`));
      this.files.unshift(added);
      this.#listFiles(added.id, this.validation.value);
      fill(this.uploadNote, h("p", { class: "alert good" }, `${added.filename}: ${plural(added.rows, "row")}, all of them good.`));
      this.#changed();
    } catch (err) {
      const rows = err instanceof ApiError ? err.rows : [];
      fill(this.uploadNote, h("div", { class: "alert", role: "alert" }, rows.length ? `${file.name} was not taken: ${plural(rows.length, "row")} cannot be used${rows.length >= 50 ? ", and perhaps more" : ""}. Correct ${rows.length === 1 ? "it" : "them"}, and choose the file again.` : `${file.name}: ${message(err)}`),
        rows.length > 0 && h("div", { class: "tablebox scroll", style: { "text-align": "left" }, tabindex: 0, role: "region", "aria-label": "Wrong rows" },
          table("Wrong rows", ["Line", "Field", "What is wrong"], rows.map((/** @type {any} */ row) => [whole(row.line), row.field ?? UNKNOWN, row.problem]), { numbers: [0] })));
    }
  }

  /** @param {string} training @param {string} validation */
  #listFiles(training, validation) {
    const title = (/** @type {any} */ file) => `${file.filename} (${plural(file.rows ?? 0, "row")}, ${size(file.bytes)})`;
    const options = (/** @type {string} */ none, /** @type {string} */ chosen) =>
      [h("option", { value: "" }, none), ...this.files.map(file => h("option", { value: file.id, selected: file.id === chosen }, title(file)))];
    fill(this.training, options(this.files.length ? "Choose a file" : "Upload a file first", training));
    fill(this.validation, options("None", validation));
  }

  /** The request. Fields that are left empty are chosen by the service. */
  #body() {
    const value = (/** @type {HTMLInputElement} */ input) => (input.value.trim() === "" ? undefined : Number(input.value));
    const more = this.more.value.trim() ? JSON.parse(this.more.value) : {};
    const config = merge(more, {
      method: { kind: this.method.value === "lora" ? undefined : this.method.value, rank: this.method.value === "full" ? undefined : value(this.rank) },
      data: { seq_len: value(this.length), packing: this.packing.checked || undefined },
      model: { precision: this.precision.value === "auto" ? undefined : this.precision.value },
      train: { eval_every_steps: this.validation.value ? value(this.evals) : undefined },
    });
    return {
      model: this.model.value, training_file: this.training.value, validation_file: this.validation.value || undefined,
      suffix: this.suffix.value.trim() || undefined, seed: value(this.seed), metadata: this.earlier?.metadata ?? undefined,
      hyperparameters: { n_epochs: value(this.epochs), batch_size: value(this.batch), learning_rate_multiplier: value(this.rate) },
      pantheraml: {
        processes: value(this.processes), priority: value(this.priority), hold: this.hold.checked || undefined,
        mode: this.earlier?.pantheraml.mode === "auto" ? undefined : this.earlier?.pantheraml.mode,
        max_runtime_seconds: this.earlier?.pantheraml.max_runtime_seconds ?? undefined, config,
      },
    };
  }

  #changed() {
    this.typing.abort();
    this.typing = new AbortController();
    const signal = AbortSignal.any([this.place.signal, this.typing.signal]);
    this.rank.disabled = this.method.value === "full";
    this.evals.disabled = !this.validation.value;
    this.problem.hidden = true;
    this.key = "";
    void this.#look(signal);
  }

  /** @param {AbortSignal} signal */
  async #look(signal) {
    if (!this.model.value || !this.training.value) {
      this.submit.disabled = true;
      fill(this.planBox, h("p", { class: "soft" }, "Choose a model and training data, and the plan appears here: devices, memory, time, and why."));
      fill(this.preview, h("div", { class: "card empty" }, "The first rows appear here as the model sees them, with what it learns to write highlighted."));
      return;
    }
    await pause(TYPING_SECONDS, signal);
    if (signal.aborted) return;
    void this.#lookAtTokens(signal);
    try {
      const planned = await send("POST", "/v1/fine_tuning/jobs?dry_run=true", this.#body(), signal);
      this.submit.disabled = !this.place.may("submit");
      fill(this.planBox, planSummary(planned));
    } catch (err) {
      if (signal.aborted) return;
      this.submit.disabled = true;
      fill(this.planBox, h("div", { class: "alert", role: "alert" }, err instanceof SyntaxError ? `Other settings: ${err.message}` : message(err)));
    }
  }

  /** @param {AbortSignal} signal */
  async #lookAtTokens(signal) {
    const body = { model: this.model.value, training_file: this.training.value, ...(this.length.value ? { seq_len: Number(this.length.value) } : {}) };
    const wanted = JSON.stringify(body);
    if (wanted === this.previewed) return;
    this.previewed = wanted;
    fill(this.preview, h("div", { class: "card empty", role: "status" }, "Tokenizing the first rows as a run would; the first time takes a few seconds."));
    try {
      const found = await send("POST", "/v1/fine_tuning/preview", body, this.place.signal);
      if (this.previewed === wanted) fill(this.preview, previewPart(found));
    } catch (err) {
      if (signal.aborted && err instanceof DOMException) return;
      if (this.previewed === wanted) { this.previewed = ""; fill(this.preview, h("div", { class: "alert" }, message(err))); }
    }
  }

  async #send() {
    if (this.submit.disabled) return;
    this.submit.disabled = true;
    this.key ||= [...crypto.getRandomValues(new Uint8Array(16))].map(byte => byte.toString(16).padStart(2, "0")).join("");
    try {
      const headers = { "Content-Type": "application/json", "Idempotency-Key": this.key }; // sent twice, it is one job
      const job = await (await request("/v1/fine_tuning/jobs", { method: "POST", body: JSON.stringify(this.#body()), headers })).json();
      say("Submitted");
      location.hash = `#/job/${job.id}`;
    } catch (err) {
      this.problem.textContent = message(err);
      this.problem.hidden = false;
      this.submit.disabled = false;
    }
  }
}

/** @param {any} planned answer to a dry run */
function planSummary({ plan, hyperparameters }) {
  const total = plan.prediction?.total_seconds ?? plan.predicted_seconds;
  const facts = [
    ["Runs on", `${plan.world_size} × ${plan.device === "cuda" ? "GPU" : "CPU process"}`], ["Takes about", total === null || total === undefined ? `not predicted${plan.device === "cuda" ? "" : " on CPUs"}` : duration(total)],
    ["Precision", [plan.precision, plan.frozen_weights].filter(Boolean).join(", base in ")], ["Rows per step", `${whole(plan.global_batch_size)}, ${whole(plan.micro_batch_size)} at a time`],
    ["Epochs", number(hyperparameters.n_epochs)],
  ];
  const reasons = plan.choices.filter((/** @type {any} */ each) => each.automatic);
  return [
    h("dl", { class: "facts" }, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])), memoryBar(plan),
    (plan.warnings ?? []).map((/** @type {string} */ text) => h("p", { class: "alert warn small" }, text)),
    h("details", {}, h("summary", {}, `Why: ${plural(reasons.length, "choice")} of the planner`),
      h("ul", { class: "small", style: { "padding-left": "18px" } }, reasons.map((/** @type {any} */ each) => h("li", {}, h("b", {}, each.name), ` = ${JSON.stringify(each.value)}: ${each.reason}`)))),
  ];
}

/** @param {any} found answer of the preview */
function previewPart(found) {
  const card = (/** @type {any} */ row) => h("article", { class: "card" },
    h("div", { class: "row small soft" }, h("span", {}, `Line ${row.line}`), h("span", { class: "number" }, row.problem ? "" : `${plural(row.tokens, "token")}, ${whole(row.trained_tokens)} trained${row.cut_tokens ? `, ${whole(row.cut_tokens)} cut off at ${whole(found.seq_len)}` : ""}`)),
    row.problem ? h("p", { class: "alert" }, row.problem)
      : h("div", { class: "tokens" }, row.pieces.map((/** @type {any} */ piece) => h("span", { class: piece.trained ? "trained" : "" }, piece.text)), row.not_shown > 0 && h("p", { class: "soft" }, `and ${plural(row.not_shown, "token")} more`)));
  return h("div", { class: "stack" },
    h("p", { class: "small soft" }, h("span", { class: "tokens" }, h("span", { class: "trained" }, "Highlighted")), " text is what the model learns to write. The rest it only reads."),
    found.rows.map(card));
}

/** @param {unknown} err */
function message(err) {
  return err instanceof ApiError || err instanceof LostError ? err.message : String(err instanceof Error ? err.message : err);
}

/** Sections over sections; undefined values are left out. @param {any} below @param {any} above */
function merge(below, above) {
  const found = structuredClone(below);
  for (const [name, values] of Object.entries(above)) {
    const known = Object.entries(/** @type {object} */ (values)).filter(([, value]) => value !== undefined);
    if (known.length) found[name] = { ...found[name], ...Object.fromEntries(known) };
  }
  return found;
}

/** @param {any} config @param {string[]} names dotted */
function without(config, names) {
  const found = structuredClone(config);
  for (const name of names) {
    const [section = "", key = ""] = name.split(".");
    if (found[section]) { delete found[section][key]; if (!Object.keys(found[section]).length) delete found[section]; }
  }
  return found;
}
