// @ts-check
// Staying up to date: polling that rests while the page is hidden, and event streams that resume without a gap.

import { ApiError, LostError, request } from "./api.js";

/** @param {number} seconds @param {AbortSignal} signal */
export function pause(seconds, signal) {
  return /** @type {Promise<void>} */ (new Promise(resolve => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  }));
}

/** @param {AbortSignal} signal */
function visible(signal) {
  return /** @type {Promise<void>} */ (new Promise(resolve => {
    if (!document.hidden) return resolve();
    const look = () => { if (!document.hidden || signal.aborted) { document.removeEventListener("visibilitychange", look); resolve(); } };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look, { once: true });
  }));
}

/**
 * Do something now and then every so many seconds, until the signal aborts or it returns false.
 * @param {number} seconds @param {AbortSignal} signal @param {() => Promise<unknown>} act
 */
export async function every(seconds, signal, act) {
  while (!signal.aborted) {
    try {
      if ((await act()) === false) return;
    } catch (err) {
      if (signal.aborted) return;
      if (!(err instanceof LostError) && !(err instanceof ApiError && (err.status >= 500 || err.status === 429))) throw err;
    }
    await pause(seconds, signal);
    await visible(signal);
  }
}

/** @typedef {{ id: string | null, kind: string, data: any }} Message */

/**
 * Follow an event stream. When the connection breaks, it is opened again after the last event that arrived; while the
 * page is hidden it is closed, since a browser has six connections to a host for all its tabs.
 * @param {string} path
 * @param {{ after: string | null, signal: AbortSignal, onMessage: (message: Message) => void, onState?: (state: "open" | "lost") => void }} options
 */
export async function follow(path, { after, signal, onMessage, onState = () => {} }) {
  let last = after, wait = 0.5;
  while (!signal.aborted) {
    await visible(signal);
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    const hide = () => { if (document.hidden) attempt.abort(); };
    signal.addEventListener("abort", stop, { once: true });
    document.addEventListener("visibilitychange", hide);
    try {
      /** @type {Record<string, string>} */
      const headers = last === null ? {} : { "Last-Event-ID": last };
      const response = await request(path, { headers, signal: attempt.signal });
      onState("open");
      wait = 0.5;
      for await (const message of messages(response)) {
        if (message.kind === "end") { onMessage(message); return; }
        onMessage(message);
        if (message.id !== null) last = message.id;
      }
    } catch (err) {
      if (signal.aborted) return;
      if (err instanceof ApiError && err.status < 500 && err.status !== 429) throw err;
    } finally {
      signal.removeEventListener("abort", stop);
      document.removeEventListener("visibilitychange", hide);
    }
    if (signal.aborted) return;
    if (!document.hidden) { onState("lost"); await pause(wait, signal); wait = Math.min(5, 1.6 * wait); }
  }
}

/** @param {Response} response @returns {AsyncGenerator<Message>} */
async function* messages(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (buffer + value.replaceAll("\r\n", "\n")).split("\n\n");
      buffer = parts.pop() ?? "";
      for (const part of parts) {
        const message = parse(part);
        if (message) yield message;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** @param {string} block @returns {Message | null} */
function parse(block) {
  /** @type {Message} */
  const found = { id: null, kind: "message", data: null };
  const data = [];
  for (const line of block.split("\n")) {
    const at = line.indexOf(":"), name = at < 0 ? line : line.slice(0, at), value = line.slice(at + 1).replace(/^ /, "");
    if (name === "id") found.id = value;
    else if (name === "event") found.kind = value;
    else if (name === "data") data.push(value);
  }
  if (!data.length) return null;
  const text = data.join("\n");
  found.data = text === "[DONE]" ? null : JSON.parse(text);
  return found;
}

export { messages };
