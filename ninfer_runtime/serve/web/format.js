/** Numbers and times as text. */

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (n) => whole.format(n);

/** "1 token", "2 tokens". */
export const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** A rate of at least 100 without fractions. */
export const rate = (perSecond) => (perSecond >= 99.95 ? whole.format(perSecond) : tenths.format(perSecond));

export const percent = (share) => `${whole.format(100 * share)} %`;

/** 0.31 s, 12 s, 2 min 05 s, 3 h 20 min, 2 d 4 h. */
export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const s = Math.floor(seconds);
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(n) {
  let unit = 0;
  for (; n >= 1024 && unit < UNITS.length - 1; unit += 1) n /= 1024;
  return `${unit === 0 || n >= 100 ? whole.format(n) : tenths.format(n)} ${UNITS[unit]}`;
}

/** "today 14:05", "12 Mar", "12 Mar 2024". */
export function when(milliseconds, now = new Date()) {
  const date = new Date(milliseconds);
  if (date.toDateString() === now.toDateString()) {
    return date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  }
  const year = date.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return date.toLocaleDateString("en-GB", { day: "numeric", month: "short", year });
}
