/** The message field: Enter sends, Shift+Enter breaks the line, the button sends or stops. */

import { byId, setAttribute, setText } from "./dom.js";
import { counted } from "./format.js";
import { draft } from "./storage.js";
import { isThinking, parseTools } from "./wire.js";

const MAX_ROWS = 10;

/** A double click on Send does not stop what it began. */
const STOP_AFTER = 400;

function toolCount(text) {
  try {
    return parseTools(text).length;
  } catch {
    return 0;
  }
}

export class Composer {
  #startedAt = 0;

  constructor(chat, settings, connection) {
    Object.assign(this, { chat, settings, connection });
    this.field = byId("prompt");
    this.button = byId("send");
    this.thinking = byId("thinking-quick");
    this.facts = byId("composer-facts");
    this.field.value = draft.text;
    byId("composer").addEventListener("submit", (event) => this.#submit(event));
    this.field.addEventListener("keydown", (event) => this.#keydown(event));
    this.field.addEventListener("input", () => {
      draft.text = this.field.value;
      this.#fit();
      this.update();
    });
    this.thinking.addEventListener("change", () => settings.update({ thinking: this.thinking.checked }));
    for (const [target, type] of [[chat, "running"], [chat, "open"], [settings, "change"], [connection, "change"], [connection, "props"]]) {
      target.addEventListener(type, () => this.update());
    }
    this.#fit();
    this.update();
  }

  focus() {
    this.field.focus();
  }

  update() {
    const isRunning = this.chat.runningIn() !== null;
    const canSend = this.connection.state === "connected" && this.field.value.trim() !== "";
    setText(this.button, isRunning ? "Stop" : "Send");
    this.button.classList.toggle("accent", !isRunning);
    // Not `disabled`: the focus stays where it is, and a reader finds out why nothing happens.
    setAttribute(this.button, "aria-disabled", isRunning || canSend ? null : "true");
    const { values } = this.settings;
    this.thinking.checked = isThinking(values, this.connection.props);
    this.thinking.parentElement.hidden = this.connection.props?.thinking?.has_switch === false;
    const nTools = toolCount(values.tools);
    const facts = [
      values.system.trim() ? "system prompt" : null,
      nTools > 0 ? counted(nTools, "tool") : null,
      values.temperature === null ? null : `temperature ${values.temperature}`,
    ];
    setText(this.facts, facts.filter(Boolean).join(" · "));
  }

  #submit(event) {
    event.preventDefault();
    if (this.chat.runningIn()) {
      if (performance.now() - this.#startedAt > STOP_AFTER) this.chat.stop();
      return;
    }
    if (this.connection.state !== "connected") {
      this.connection.retryNow();
      return;
    }
    this.#startedAt = performance.now();
    if (!this.chat.send(this.field.value)) return;
    this.field.value = "";
    draft.text = "";
    this.#fit();
    this.update();
    this.focus();
  }

  #keydown(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.chat.runningIn()) byId("composer").requestSubmit();
  }

  /** As many rows as the text has, up to a limit. */
  #fit() {
    if (CSS.supports("field-sizing", "content")) return;
    this.field.rows = 1;
    const style = getComputedStyle(this.field);
    const padding = Number.parseFloat(style.paddingTop) + Number.parseFloat(style.paddingBottom);
    this.field.rows = Math.min(MAX_ROWS, Math.max(1, Math.round((this.field.scrollHeight - padding) / Number.parseFloat(style.lineHeight))));
  }
}
