// @ts-check
// The page's only way to the service: its public REST interface. A session cookie, which scripts cannot read, says who asks.

/** @typedef {{ user: string | null, scopes: string[], keys_required: boolean, version: string }} Session */
/**
 * @typedef {object} Job
 * @property {string} id
 * @property {string} model
 * @property {string | null} fine_tuned_model
 * @property {string | null} [user_provided_suffix]
 * @property {number} gpu_hours
 * @property {number} cpu_slot_hours
 * @property {number | null} energy_joules
 * @property {number | null} cost
 * @property {string} state
 * @property {string} status
 * @property {string} organization_id
 * @property {number} created_at
 * @property {number | null} finished_at
 * @property {number | null} estimated_finish
 * @property {number} state_since
 * @property {string} training_file
 * @property {string | null} validation_file
 * @property {Record<string, any>} hyperparameters
 * @property {Record<string, string> | null} metadata
 * @property {number} seed
 * @property {number} priority
 * @property {number} processes
 * @property {string} device
 * @property {number} starts
 * @property {number | null} trained_tokens
 * @property {string | null} waiting_reason
 * @property {number | null} queue_position
 * @property {number | null} estimated_start
 * @property {{ code: string, message: string } | null} error
 * @property {string[]} result_files
 */

const CHANGES = { "X-Requested-With": "pantheraml" };

export class ApiError extends Error {
  /** @param {number} status @param {string} message @param {any} [body] */
  constructor(status, message, body) {
    super(message);
    this.status = status;
    this.param = body?.error?.param ?? null;
    this.code = body?.error?.code ?? null;
    this.rows = body?.error?.rows ?? [];
  }
}

/** The service cannot be reached. */
export class LostError extends Error {}

/** Told when a session is needed, and when the connection is lost or comes back. */
export const signals = new EventTarget();
let lost = false;

/** @param {boolean} value */
function setLost(value) {
  if (value === lost) return;
  lost = value;
  signals.dispatchEvent(new Event(value ? "lost" : "back"));
}

/**
 * @param {string} path @param {RequestInit} [options]
 * @returns {Promise<Response>} a good one; ApiError or LostError else
 */
export async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options, headers: { ...CHANGES, ...options.headers } });
  } catch (err) {
    if (err instanceof DOMException && err.name === "AbortError") throw err;
    setLost(true);
    throw new LostError("The service cannot be reached.");
  }
  setLost(false);
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (response.status === 401 && path !== "/session") signals.dispatchEvent(new Event("signed-out"));
  throw new ApiError(response.status, body?.error?.message ?? `The service answered ${response.status}.`, body);
}

/** @param {string} path @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function get(path, signal) {
  return (await request(path, { signal })).json();
}

/** @param {string} method @param {string} path @param {any} [body] @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function send(method, path, body, signal) {
  const content = body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  return (await request(path, { method, signal, ...content })).json();
}

/** @returns {Promise<Session>} */
export const session = () => get("/session");

/** @param {string} key @returns {Promise<Session>} */
export async function signIn(key) {
  return (await request("/session", { method: "POST", headers: { Authorization: `Bearer ${key}` } })).json();
}

export const jobPath = (/** @type {string} */ id) => `/v1/fine_tuning/jobs/${encodeURIComponent(id)}`;

/**
 * Upload a file, with progress. @param {File} file @param {(share: number) => void} onProgress
 * @returns {Promise<any>} the file object
 */
export function upload(file, onProgress) {
  return new Promise((resolve, reject) => {
    const form = new FormData(), sending = new XMLHttpRequest();
    form.append("purpose", "fine-tune");
    form.append("file", file);
    sending.open("POST", "/v1/files");
    for (const [name, value] of Object.entries(CHANGES)) sending.setRequestHeader(name, value);
    sending.upload.addEventListener("progress", event => onProgress(event.loaded / event.total));
    sending.addEventListener("error", () => reject(new LostError("The upload was interrupted.")));
    sending.addEventListener("load", () => {
      let body = null;
      try { body = JSON.parse(sending.responseText); } catch { /* no JSON: the status tells */ }
      if (sending.status < 300) resolve(body);
      else reject(new ApiError(sending.status, body?.error?.message ?? `The service answered ${sending.status}.`, body));
    });
    sending.send(form);
  });
}
