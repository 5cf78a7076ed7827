// @ts-check
// Sign-in by key. The key goes to the service once; what stays in the browser is a cookie that scripts cannot read.

import { signIn } from "../api.js";
import { field, fill, h } from "../dom.js";

/** @param {HTMLElement} main @param {() => Promise<void>} onDone */
export function signInView(main, onDone) {
  const key = h("input", { type: "password", name: "key", autocomplete: "current-password", required: true, spellcheck: "false" });
  const problem = h("div", { class: "alert", role: "alert", hidden: true });
  const button = h("button", { class: "main" }, "Sign in");
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    button.disabled = true;
    problem.hidden = true;
    try {
      await signIn(key.value.trim());
      key.value = "";
      await onDone();
    } catch (err) {
      problem.textContent = err instanceof Error ? err.message : String(err);
      problem.hidden = false;
      key.select();
    } finally {
      button.disabled = false;
    }
  };
  fill(main, h("form", { class: "signin card stack", on: { submit } },
    h("h1", {}, "Sign in"),
    field("API key", key, "It begins with pml-. The administrator of this service makes one with `pantheraml keys create`."),
    problem, h("div", {}, button)));
  key.focus();
}
