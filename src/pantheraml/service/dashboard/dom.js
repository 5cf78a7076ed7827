// @ts-check
// Building elements. Text goes in as text nodes alone, so what a job, a file or a model says is never markup.

import { UNKNOWN } from "./format.js";

/** @typedef {Node | string | number | null | undefined | false} Child */
/** @typedef {Record<string, any>} Props */

/**
 * Make an element. `on` holds listeners, `data` data attributes, `style` CSS properties; others are attributes, where
 * true means present, and false, null and undefined mean absent.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Props} [props]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, String(text));
    else if (name === "value" && "value" in element) /** @type {any} */ (element).value = value;
    else element.setAttribute(name === "class" ? "class" : name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

/** @param {Element} element @param {(Child | Child[])[]} children */
function append(element, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/**
 * Replace what an element holds, and keep the focus on the control with the same `data-focus`, and the scroll position.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function fill(element, ...children) {
  const active = document.activeElement;
  const key = active instanceof HTMLElement && element.contains(active) ? active.dataset.focus : undefined;
  const fragment = document.createElement("div");
  append(fragment, children);
  element.replaceChildren(...fragment.childNodes);
  if (key === undefined) return;
  const again = element.querySelector(`[data-focus="${CSS.escape(key)}"]`);
  if (again instanceof HTMLElement) again.focus({ preventScroll: true });
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {...Element} children
 */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/**
 * A labelled control. @param {string} label @param {HTMLElement} control @param {Child} [hint]
 */
export function field(label, control, hint) {
  if (!control.id) control.id = `field-${++field.count}`;
  const text = hint === undefined ? null : h("span", { class: "hint", id: `${control.id}-hint` }, hint);
  if (text) control.setAttribute("aria-describedby", text.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, text);
}
field.count = 0;

/**
 * A table. Cells are texts or nodes; numbers are the right-aligned columns, optional those that are left out if nothing is
 * known of any row.
 * @param {string} caption @param {string[]} columns @param {Child[][]} rows
 * @param {{ numbers?: number[], optional?: number[], cards?: boolean }} [options]
 */
export function table(caption, columns, rows, { numbers = [], optional = [], cards = false } = {}) {
  const kept = columns.map((_, index) => index).filter(index => !optional.includes(index) || rows.some(row => row[index] !== UNKNOWN));
  const kind = (/** @type {number} */ index) => (numbers.includes(index) ? "number" : "");
  const cell = (/** @type {Child[]} */ row, /** @type {number} */ index) =>
    h("td", { class: columns[index] ? kind(index) : "actions", data: cards && columns[index] ? { label: columns[index] } : {} }, row[index]);
  return h("table", { class: cards ? "cards" : "" },
    h("caption", { class: "only-read" }, caption),
    h("thead", {}, h("tr", {}, kept.map(index => h("th", { class: kind(index), scope: "col" }, columns[index] || h("span", { class: "only-read" }, "actions"))))),
    h("tbody", {}, rows.map(row => h("tr", {}, kept.map(index => cell(row, index))))));
}

/** A bar between 0 and 1. @param {number} share @param {string} label @param {string} [kind] */
export function meter(share, label, kind = "") {
  const percent = Math.round(100 * Math.max(0, Math.min(1, share)));
  return h("div", { class: "meter", role: "meter", "aria-label": label, "aria-valuenow": percent, "aria-valuemin": 0, "aria-valuemax": 100 },
    h("i", { class: kind, style: { width: `${percent}%` } }));
}

let hiding = 0;

/** Say something at the foot of the page; empty hides it. @param {string} text @param {number} [seconds] */
export function say(text, seconds = 4) {
  const box = document.getElementById("notice");
  if (!box) return;
  clearTimeout(hiding);
  if (text) box.textContent = text; // what is hidden keeps its words, as it fades
  box.classList.toggle("shown", text !== "");
  if (text && seconds) hiding = setTimeout(() => say(""), 1000 * seconds);
}
