/** The live panel: asks for `/stats` every second while somebody can see it. */

import { Cells, PartsBar, Sparkline } from "./charts.js";
import { h, setText } from "./dom.js";
import { bytes, count, counted, duration, percent, rate } from "./format.js";
import { StatsHistory } from "./stats.js";

const EVERY = 1000;

const share = (value) => (value === null ? "–" : percent(value));

/** A titled block with a large number, its unit, a drawing and a line of detail. */
class Tile {
  constructor(title, unit, drawing) {
    this.value = h("span", { class: "tile-value" }, "–");
    this.unit = h("span", { class: "tile-unit" }, unit);
    this.detail = h("p", { class: "tile-detail" });
    this.element = h(
      "section",
      { class: "tile" },
      h("h3", { class: "tile-title" }, title),
      h("div", { class: "tile-row" }, h("p", { class: "tile-number" }, this.value, " ", this.unit), drawing),
      this.detail,
    );
  }

  update(value, detail, unit = null) {
    setText(this.value, value);
    if (unit !== null) setText(this.unit, unit);
    setText(this.detail, detail);
    this.detail.hidden = detail === "";
  }
}

/** One row per part of the memory plan, the largest fills the bar. */
function memoryTable(plan) {
  const largest = Math.max(...plan.rows.map((row) => row.bytes), 1);
  const rows = plan.rows
    .filter((row) => row.bytes > 0)
    .map((row) => {
      const bar = new PartsBar(row.label, ["used"]);
      bar.update([row.bytes], largest, bytes(row.bytes));
      bar.element.setAttribute("aria-hidden", "true");
      const place = row.place === "host" && !row.label.startsWith("host") ? " (host)" : "";
      return h("tr", {}, h("th", { scope: "row" }, `${row.label}${place}`), h("td", { class: "memory-bar" }, bar.element), h("td", { class: "number" }, bytes(row.bytes)));
    });
  const total = h("tr", { class: "memory-total" }, h("th", { scope: "row" }, "device in all"), h("td"), h("td", { class: "number" }, bytes(plan.device_bytes)));
  return h("table", { class: "memory" }, h("caption", { class: "visually-hidden" }, "Memory plan"), h("tbody", {}, rows, total));
}

export class Panel {
  #history = new StatsHistory();
  #isShown = false;
  #timer = 0;
  #isAsking = false;

  constructor(root, api, connection) {
    Object.assign(this, { root, api, connection });
    const spark = (label, isAmount) => new Sparkline(label, StatsHistory.length, isAmount);
    this.sparks = {
      generated: spark("Generated tokens per second", true),
      prefilled: spark("Prompt tokens computed per second", true),
      acceptance: spark("Accepted drafts", false),
      reuse: spark("Reused prompt tokens", false),
    };
    this.cells = new Cells("Rows");
    this.pages = new PartsBar("KV pages", ["used", "kept"]);
    this.tiles = {
      generated: new Tile("Generated", "tokens/s", this.sparks.generated.element),
      prefilled: new Tile("Prefill", "tokens/s", this.sparks.prefilled.element),
      rows: new Tile("Batch rows", "", this.cells.element),
      acceptance: new Tile("Draft acceptance", "", this.sparks.acceptance.element),
      pages: new Tile("KV pages", "", this.pages.element),
      reuse: new Tile("Prefix hits", "", this.sparks.reuse.element),
    };
    this.tiles.pages.element.classList.add("tile-stacked");
    this.memory = h("section", { class: "tile", hidden: true });
    this.about = h("section", { class: "tile", hidden: true });
    this.note = h("p", { class: "panel-note" }, "Waiting for the server.");
    this.body = h("div", { class: "tiles", hidden: true }, Object.values(this.tiles).map((tile) => tile.element));
    root.append(this.note, this.body, this.memory, this.about);
    connection.addEventListener("change", () => this.#connected());
    connection.addEventListener("props", () => this.#showProps());
    document.addEventListener("visibilitychange", () => this.#schedule(0));
  }

  /** Nobody asks for numbers that are not shown. */
  setShown(isShown) {
    this.#isShown = isShown;
    this.#schedule(0);
  }

  #connected() {
    if (this.connection.state === "connected") {
      this.#schedule(0);
      return;
    }
    this.root.classList.add("is-stale");
    this.note.hidden = false;
    setText(this.note, this.connection.state === "key" ? "These numbers need the API key." : "No connection: these numbers stand still.");
  }

  #showProps() {
    const { memory_plan: plan, model, backend, device, version, kv } = this.connection.props;
    this.memory.hidden = !plan?.rows;
    if (plan?.rows) this.memory.replaceChildren(h("h3", { class: "tile-title" }, "Memory plan"), memoryTable(plan));
    const facts = [["Model", model?.id], ["Weights", model?.weights_id], ["Runs on", backend && `${backend}, ${device}`], ["KV", kv?.dtype && `${kv.dtype}, ${kv.page_tokens} tokens a page`], ["Version", version]];
    this.uptime = h("dd");
    this.requests = h("dd");
    const rows = facts.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]);
    this.about.hidden = false;
    this.about.replaceChildren(h("h3", { class: "tile-title" }, "Server"), h("dl", { class: "about" }, rows, h("dt", {}, "Up for"), this.uptime, h("dt", {}, "Finished"), this.requests));
  }

  #schedule(wait) {
    clearTimeout(this.#timer);
    const isWanted = this.#isShown && !document.hidden && this.connection.state === "connected";
    if (isWanted) this.#timer = setTimeout(() => this.#ask(), wait);
  }

  async #ask() {
    if (this.#isAsking) return;
    this.#isAsking = true;
    try {
      this.#show(await this.api.get("stats"));
      this.#schedule(EVERY);
    } catch (error) {
      if (error.status === 404) setText(this.note, "This server offers no live numbers.");
      else {
        this.connection.fail(error);
        this.#schedule(EVERY);
      }
    } finally {
      this.#isAsking = false;
    }
  }

  #show(stats) {
    const history = this.#history;
    history.add(stats);
    // It was started anew between two questions.
    const known = this.connection.props?.instance;
    if (known !== undefined && stats.instance !== known) this.connection.meet();
    this.root.classList.remove("is-stale");
    this.body.hidden = false;
    this.note.hidden = stats.is_healthy !== false;
    if (!this.note.hidden) setText(this.note, `The engine reports a fault: ${stats.fault ?? "unknown"}`);
    for (const name of ["generated", "prefilled"]) {
      const now = rate(history.latest(name) ?? 0);
      this.tiles[name].update(now, "");
      this.sparks[name].update(history.series(name), { say: `${now} now` });
    }
    this.#showRows(stats);
    this.#showAcceptance(stats);
    this.#showPages(stats);
    this.#showReuse(stats);
    if (this.uptime) {
      setText(this.uptime, duration(stats.uptime_seconds));
      const finished = Object.entries(stats.requests_finished ?? {}).filter(([, n]) => n > 0);
      setText(this.requests, finished.map(([reason, n]) => `${count(n)} ${reason}`).join(", ") || "nothing yet");
    }
  }

  #showRows(stats) {
    const { running, max_rows: most, prefilling, waiting } = stats;
    const kinds = Array.from({ length: most }, (_, index) => (index < running ? (index >= running - prefilling ? "waiting" : "busy") : "free"));
    this.cells.update(kinds, `${running} of ${most}`);
    const mean = this.#history.latest("rows");
    const details = [`${prefilling} in prefill`, `${waiting} waiting`, mean === null ? null : `${mean.toFixed(1)} rows a round`];
    this.tiles.rows.update(String(running), details.filter(Boolean).join(", "), `of ${most}`);
  }

  #showAcceptance(stats) {
    if (this.connection.props?.speculation?.proposer === "none" || (!this.connection.props?.speculation && stats.drafted === 0)) {
      this.tiles.acceptance.element.hidden = true;
      return;
    }
    this.tiles.acceptance.element.hidden = false;
    const now = this.#history.latest("acceptance") ?? (stats.drafted > 0 ? stats.accepted / stats.drafted : null);
    const places = stats.accepted_at.length > 1 ? `\nby place ${stats.accepted_at.map(count).join(", ")}` : "";
    const detail = stats.drafted === 0 ? "no drafts yet" : `${count(stats.accepted)} of ${count(stats.drafted)} drafts since the start${places}`;
    this.tiles.acceptance.update(share(now), detail);
    this.sparks.acceptance.update(this.#history.series("acceptance"), { top: 1, say: share(now) });
  }

  #showPages(stats) {
    const { pages_cached: kept, pages_total: total, snapshots_used: states, snapshots_total: allStates } = stats;
    const busy = stats.pages_used - kept;
    const saved = allStates > 0 ? `\n${count(states)} of ${counted(allStates, "saved state")}` : "";
    this.pages.update([busy, kept], total, `${busy} in use, ${kept} kept, of ${total}`);
    this.tiles.pages.update(count(busy), `${count(kept)} kept for reuse, ${count(total - stats.pages_used)} free${saved}`, `of ${count(total)} in use`);
  }

  #showReuse(stats) {
    const all = stats.prompt_tokens > 0 ? stats.reused_tokens / stats.prompt_tokens : null;
    this.tiles.reuse.update(share(all), stats.prompt_tokens > 0 ? `${count(stats.reused_tokens)} of ${counted(stats.prompt_tokens, "prompt token")} since the start` : "no prompts yet");
    this.sparks.reuse.update(this.#history.series("reuse"), { top: 1, say: share(all) });
  }
}
