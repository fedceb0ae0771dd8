/** One message as an element that follows its object. */

import { copyButton } from "./clipboard.js";
import { h, markScrollers, setText } from "./dom.js";
import { count, counted, duration, rate } from "./format.js";
import { MarkdownView } from "./markdown.js";
import { ToolCalls } from "./toolcalls.js";
import { answerRate } from "./wire.js";

const OUTCOMES = {
  length: "ended at the token limit",
  stopped: "stopped",
  interrupted: "interrupted",
};

const ERROR_TITLES = {
  network: "The connection was lost",
  key: "The server asks for an API key",
  busy: "The server is busy",
  unavailable: "The server is not available",
  refused: "The server refused this request",
  failed: "The server failed",
  page: "This request was not sent",
};

const quiet = (label, onclick, name = label) => h("button", { type: "button", class: "quiet", onclick, "aria-label": name }, label);

export class UserView {
  /** `onEdit(message, text)` */
  constructor(message, onEdit) {
    this.message = message;
    this.onEdit = onEdit;
    this.text = h("div", { class: "user-text" }, message.content);
    this.editButton = quiet("Edit", () => this.#edit(), "Edit this message");
    this.actions = h("div", { class: "actions" }, this.editButton, copyButton(() => message.content, "Copy this message"));
    this.element = h("article", { class: "message user" }, h("h2", { class: "visually-hidden" }, "You"), this.text, this.actions);
  }

  update({ isBusy }) {
    this.editButton.hidden = isBusy;
  }

  #edit() {
    const field = h("textarea", { class: "field", rows: String(Math.min(12, this.message.content.split("\n").length + 1)), "aria-label": "Edit this message" });
    field.value = this.message.content;
    const form = h(
      "form",
      { class: "edit" },
      field,
      h("div", { class: "edit-foot" }, quiet("Cancel", () => close()), h("button", { type: "submit", class: "button accent" }, "Send again")),
    );
    const close = () => {
      form.replaceWith(this.text);
      this.actions.hidden = false;
      this.editButton.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.onEdit(this.message, field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.text.replaceWith(form);
    this.actions.hidden = true;
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

class Thinking {
  constructor() {
    this.label = h("span", { class: "thinking-label" });
    this.preview = h("span", { class: "thinking-preview", "aria-hidden": "true" });
    this.body = h("div", { class: "thinking-body prose" });
    this.view = new MarkdownView(this.body);
    this.element = h("details", { class: "thinking" }, h("summary", {}, this.label, this.preview), this.body);
    this.element.addEventListener("toggle", () => {
      this.#render();
      markScrollers(this.body);
    });
  }

  update(message, isThinking) {
    this.text = message.reasoning;
    const seconds = message.times.thought ?? 0;
    const tokens = message.usage?.completion_tokens_details?.reasoning_tokens;
    const size = tokens ? `, ${counted(tokens, "token")}` : "";
    setText(this.label, isThinking ? "Thinking" : `Thought for ${duration(seconds)}${size}`);
    this.element.classList.toggle("is-thinking", isThinking);
    const line = isThinking ? (this.text.trimEnd().split("\n").at(-1) ?? "").slice(-160) : "";
    setText(this.preview, line);
    if (this.element.open) this.#render();
  }

  #render() {
    if (this.element.open && this.text) this.view.update(this.text);
  }
}

export class AnswerView {
  #thinking = null;
  #calls = null;
  #errorKey = "";
  #timer = 0;

  /** `on`: {regenerate(message), results(message, texts), retryNow(), stop()} */
  constructor(message, on) {
    this.message = message;
    this.on = on;
    this.content = h("div", { class: "answer-text prose" });
    this.markdown = new MarkdownView(this.content);
    this.start = h("div", { class: "start" }, h("span", { class: "pulse" }), h("span", {}, "Waiting for the first token"));
    this.trouble = h("div", { class: "trouble" });
    this.facts = h("ul", { class: "facts" });
    this.again = quiet("Regenerate", () => this.on.regenerate(this.message), "Regenerate this answer");
    this.actions = h("div", { class: "actions" }, copyButton(() => message.content, "Copy this answer"), this.again);
    this.foot = h("div", { class: "answer-foot" }, this.facts, this.actions);
    this.element = h("article", { class: "message answer" }, h("h2", { class: "visually-hidden" }, "Answer"), this.content, this.start, this.trouble, this.foot);
  }

  /** isRunning: this answer is being written; isBusy: some answer of the conversation is; isLast: nothing follows. */
  update({ isRunning, isBusy, isLast }) {
    const { message } = this;
    const isEmpty = !message.content && !message.reasoning && message.calls.length === 0;
    this.element.classList.toggle("is-running", isRunning);
    this.start.hidden = !isRunning || !isEmpty || Boolean(message.waiting);
    this.#updateThinking(isRunning);
    this.markdown.update(message.content, !isRunning);
    this.content.hidden = message.content === "";
    this.#updateCalls(isRunning, isLast);
    this.#updateTrouble(isBusy, isLast);
    this.foot.hidden = isRunning;
    this.again.hidden = isBusy || !isLast || Boolean(message.error);
    if (!isRunning) {
      this.#updateFacts();
      markScrollers(this.element);
    }
  }

  #updateThinking(isRunning) {
    if (!this.message.reasoning.trim()) return;
    if (this.#thinking === null) {
      this.#thinking = new Thinking();
      this.content.before(this.#thinking.element);
    }
    this.#thinking.update(this.message, isRunning && !this.message.content && this.message.calls.length === 0);
  }

  #updateCalls(isRunning, isLast) {
    if (this.message.calls.length === 0) return;
    if (this.#calls === null) {
      this.#calls = new ToolCalls((results) => this.on.results(this.message, results));
      this.start.before(this.#calls.element);
    }
    this.#calls.update(this.message.calls, { isRunning, isLast });
  }

  #updateTrouble(isBusy, isLast) {
    const { error, waiting } = this.message;
    const key = JSON.stringify([error, waiting, isBusy, isLast]);
    if (key === this.#errorKey) return;
    this.#errorKey = key;
    clearInterval(this.#timer);
    if (waiting) {
      this.trouble.replaceChildren(this.#waitingCard(waiting));
    } else if (error) {
      const canRetry = isLast && !isBusy;
      const retry = h("button", { type: "button", class: "button", onclick: () => this.on.regenerate(this.message) }, "Try again");
      const title = h("p", { class: "card-title" }, ERROR_TITLES[error.kind] ?? ERROR_TITLES.failed);
      const code = error.code ? h("code", {}, error.code) : null;
      this.trouble.replaceChildren(
        h("div", { class: "card bad" }, title, h("p", {}, error.text, code ? " " : null, code), canRetry ? h("div", { class: "card-foot" }, retry) : null),
      );
    } else {
      this.trouble.replaceChildren();
    }
  }

  #waitingCard(waiting) {
    const left = h("span", { class: "number" });
    const tick = () => setText(left, String(Math.max(0, Math.ceil((waiting.until - Date.now()) / 1000))));
    tick();
    this.#timer = setInterval(tick, 500);
    return h(
      "div",
      { class: "card warn" },
      h("p", { class: "card-title" }, ERROR_TITLES[waiting.kind]),
      h("p", {}, waiting.text),
      h("p", {}, "Trying again in ", left, " s."),
      h(
        "div",
        { class: "card-foot" },
        h("button", { type: "button", class: "button", onclick: () => this.on.retryNow() }, "Try now"),
        quiet("Give up", () => this.on.stop()),
      ),
    );
  }

  #updateFacts() {
    const { usage, times, finish, content } = this.message;
    const speed = answerRate(this.message);
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    const facts = [
      OUTCOMES[finish],
      usage ? counted(usage.completion_tokens, "token") : null,
      speed === null ? null : `${rate(speed)} tokens/s`,
      times.first === undefined ? null : `first after ${duration(times.first)}`,
      usage ? `prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} reused` : ""}` : null,
    ];
    this.facts.replaceChildren(...facts.filter(Boolean).map((text) => h("li", {}, text)));
    this.actions.firstChild.hidden = content === "";
  }

  /** Paragraphs to read aloud, and how it went on. */
  spoken(isEnd) {
    return this.markdown.settledTexts(isEnd);
  }

  get outcome() {
    const { error, finish, calls } = this.message;
    if (error) return `${ERROR_TITLES[error.kind] ?? ERROR_TITLES.failed}. ${error.text}`;
    if (finish === "stopped") return "Answer stopped.";
    const open = calls.filter((call) => call && call.result === null).length;
    return open > 0 ? `${counted(open, "tool call")} to answer.` : "Answer complete.";
  }
}
