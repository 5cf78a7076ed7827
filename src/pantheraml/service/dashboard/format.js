// @ts-check
// Figures as people read them. Unknown is a dash, never zero.

export const UNKNOWN = "–";
const GIB = 2 ** 30;

/** @param {number | null | undefined} value @param {number} [digits] significant digits */
export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return Number(value.toPrecision(digits - 1)).toExponential().replace("e+", "e");
  return value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(digits, Math.trunc(Math.log10(Math.abs(value) || 1)) + 1) });
}

/** @param {number | null | undefined} value */
export function whole(value) {
  return value === null || value === undefined ? UNKNOWN : Math.round(value).toLocaleString("en-US");
}

/** @param {number | null | undefined} value @param {string} unit */
export function unit(value, unit, digits = 3) {
  return value === null || value === undefined ? UNKNOWN : `${number(value, digits)} ${unit}`;
}

/** @param {number | null | undefined} bytes */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return UNKNOWN;
  if (bytes >= GIB) return `${number(bytes / GIB, 3)} GiB`;
  if (bytes >= 2 ** 20) return `${number(bytes / 2 ** 20, 3)} MiB`;
  return bytes >= 1024 ? `${number(bytes / 1024, 3)} KiB` : `${bytes} B`;
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return UNKNOWN;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.trunc(whole / 60)} min ${whole % 60} s`;
  const hours = Math.trunc(whole / 3600);
  return hours < 48 ? `${hours} h ${Math.trunc((whole % 3600) / 60)} min` : `${Math.trunc(hours / 24)} d ${hours % 24} h`;
}

/** Moment in the reader's time zone. @param {number | null | undefined} seconds since 1970 */
export function moment(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  const date = new Date(1000 * seconds), today = new Date();
  const time = date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" });
  if (date.toDateString() === today.toDateString()) return time;
  return `${date.toLocaleDateString(undefined, { day: "numeric", month: "short", year: date.getFullYear() === today.getFullYear() ? undefined : "numeric" })}, ${time}`;
}

/** @param {number | null | undefined} seconds since 1970 */
export function ago(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  return passed < 5 ? "just now" : `${duration(passed < 3600 ? Math.round(passed / (passed < 60 ? 1 : 60)) * (passed < 60 ? 1 : 60) : passed).replace(/ 0 s$/, "")} ago`;
}

/** @param {number} count @param {string} one @param {string} [many] */
export function plural(count, one, many = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}

/** The color of a job's state: good, bad, warn, now or nothing. @param {string} state */
export function tone(state) {
  return { succeeded: "good", failed: "bad", crashed: "bad", running: "now", starting: "now", paused: "warn", pausing: "warn", cancelling: "warn" }[state] ?? "";
}

/** Devices in words: GPU 0, 1; a share of one: GPU 0 (1/2). @param {string[]} names such as `gpu:0` or `gpu:0:1/2` */
export function deviceNames(names) {
  return names.length ? `${names[0]?.startsWith("gpu") ? "GPU" : "CPU slot"} ${names.map(name => name.slice(4).replace(/:(.*)/, " ($1)")).join(", ")}` : UNKNOWN;
}

/** Short name of a job. @param {{ id: string, model: string, user_provided_suffix?: string | null }} job */
export function jobName(job) {
  return job.user_provided_suffix || `${job.model} ${job.id.slice(-6)}`;
}
