/** Live numbers: rates and shares from the differences between two answers of the server's counters. */

const KEEP = 90;

const ratio = (part, whole) => (whole > 0 ? part / whole : null);

/** Between two states of the counters; null where nothing happened to measure. */
export function between(before, now) {
  const seconds = now.uptime_seconds - before.uptime_seconds;
  const gained = (name) => now[name] - before[name];
  return {
    generated: ratio(gained("generated_tokens"), seconds) ?? 0,
    prefilled: ratio(gained("computed_prefill_tokens"), seconds) ?? 0,
    rows: ratio(gained("row_rounds"), gained("rounds")),
    acceptance: ratio(gained("accepted"), gained("drafted")),
    reuse: ratio(gained("reused_tokens"), gained("prompt_tokens")),
  };
}

export class StatsHistory {
  #last = null;
  samples = [];

  /** Add an answer of `/stats`; a restarted server begins a new history. */
  add(stats) {
    if (this.#last !== null && (this.#last.instance !== stats.instance || stats.uptime_seconds < this.#last.uptime_seconds)) this.clear();
    if (this.#last !== null && stats.uptime_seconds > this.#last.uptime_seconds) {
      this.samples.push(between(this.#last, stats));
      if (this.samples.length > KEEP) this.samples.shift();
    }
    this.#last = stats;
  }

  clear() {
    this.#last = null;
    this.samples = [];
  }

  /** The last values of one number, oldest first. */
  series(name) {
    return this.samples.map((sample) => sample[name]);
  }

  /** The latest value that says something, null when none does. */
  latest(name) {
    return this.samples.findLast((sample) => sample[name] !== null)?.[name] ?? null;
  }

  static get length() {
    return KEEP;
  }
}
