// @ts-check
// Start of the page: who is signed in, which view the address names, and what the connection is like.

import { send, session, signals } from "./api.js";
import { redrawAll } from "./chart.js";
import { fill, h, say } from "./dom.js";
import { signInView } from "./views/sign_in.js";

/** @typedef {import("./api.js").Session} Session */
/**
 * What a view is given. @typedef {object} Place
 * @property {Session} session
 * @property {string[]} path parts of the address after the view's name
 * @property {URLSearchParams} query
 * @property {AbortSignal} signal aborts when the view is left
 * @property {(scope: string) => boolean} may
 */
/** @typedef {(main: HTMLElement, place: Place) => Promise<void> | void} View */
/** @typedef {{ name: string, title: string, scope?: string, load: () => Promise<View> }} Page */

/** @type {Page[]} */
const PAGES = [
  { name: "", title: "Overview", load: async () => (await import("./views/overview.js")).overview },
  { name: "new", title: "New job", scope: "submit", load: async () => (await import("./views/new_job.js")).newJob },
  { name: "jobs", title: "Jobs", load: async () => (await import("./views/jobs.js")).jobs },
  { name: "compare", title: "Compare", load: async () => (await import("./views/compare.js")).compare },
  { name: "playground", title: "Playground", scope: "submit", load: async () => (await import("./views/playground.js")).playground },
];
/** @type {Page} */
const JOB = { name: "job", title: "Job", load: async () => (await import("./views/job.js")).job };

/** @type {Session | null} */
let current = null;
let leaving = new AbortController();

const element = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));
const main = element("main");
const may = (/** @type {string} */ scope) => current?.scopes.includes(scope) ?? false;

function drawBar(/** @type {string} */ name) {
  const pages = current?.user ? PAGES.filter(page => !page.scope || may(page.scope)) : [];
  fill(element("nav"), pages.map(page =>
    h("a", { href: `#/${page.name}`, "aria-current": page.name === name || (page.name === "jobs" && name === "job") ? "page" : null, data: { focus: page.name } }, page.title)));
  const user = current?.user && current.keys_required ? current.user : "";
  element("user").textContent = user;
  element("sign-out").hidden = !user;
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const address = new URL(location.hash.slice(1) || "/", "http://page");
  const [, name = "", ...path] = address.pathname.split("/").map(decodeURIComponent);
  const page = name === "job" ? JOB : PAGES.find(each => each.name === name);
  drawBar(name);
  if (!current) return;
  if (!current.user) {
    document.title = "Sign in · PantheraML";
    signInView(main, async () => { await start(); });
    return;
  }
  if (!page) { fill(main, h("h1", {}, "There is no such page"), h("p", {}, h("a", { href: "#/" }, "To the overview"))); return; }
  document.title = `${page.title} · PantheraML`;
  if (page.scope && !may(page.scope)) {
    fill(main, h("h1", {}, page.title), h("div", { class: "alert warn" }, `Your key may only look: this page needs one with the scope ${page.scope}.`));
    return;
  }
  try {
    const view = await page.load();
    if (signal.aborted) return;
    await view(main, { session: current, path, query: address.searchParams, signal, may });
  } catch (err) {
    if (signal.aborted || (err instanceof DOMException && err.name === "AbortError")) return;
    const message = err instanceof Error ? err.message : String(err);
    fill(main, h("h1", {}, page.title), h("div", { class: "alert", role: "alert" }, message),
      h("button", { type: "button", on: { click: () => void show() } }, "Try again"));
  }
}

async function start() {
  try {
    current = await session();
  } catch (err) {
    fill(main, h("div", { class: "alert", role: "alert" }, err instanceof Error ? err.message : String(err)));
    setTimeout(() => void start(), 2000);
    return;
  }
  await show();
}

signals.addEventListener("signed-out", () => { if (current?.user) { current = { ...current, user: null, scopes: [] }; void show(); } });
signals.addEventListener("lost", () => say("Connection to the service lost; reconnecting. Jobs are not affected.", 0));
signals.addEventListener("back", () => say("Connected again."));
element("sign-out").addEventListener("click", async () => { current = await send("DELETE", "/session"); await show(); });

const THEMES = ["", "light", "dark"];
function nameTheme() {
  const name = document.documentElement.dataset.theme ?? "";
  element("theme").textContent = `Theme: ${name || "auto"}`;
  element("theme").setAttribute("aria-label", `Theme: ${name || "auto, as the system"}`);
}
element("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + 1) % THEMES.length] ?? "";
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("theme", next);
  nameTheme();
  redrawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("hashchange", () => { void show(); scrollTo(0, 0); main.focus({ preventScroll: true }); });
nameTheme();
void start();
