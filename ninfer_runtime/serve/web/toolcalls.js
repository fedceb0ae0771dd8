/** The calls of an answer: name, arguments as they arrive, and a field for each result. */

import { copyButton } from "./clipboard.js";
import { h, setText } from "./dom.js";
import { highlight } from "./highlight.js";
import { argumentsObject } from "./wire.js";

function pretty(text) {
  const value = argumentsObject(text);
  return value === null ? text : JSON.stringify(value, null, 2);
}

function stateOf(call, isRunning) {
  if (call.result !== null) return "answered";
  if (argumentsObject(call.arguments) !== null && !isRunning) return "waiting for a result";
  return isRunning ? "writing" : "incomplete";
}

let serial = 0;

class CallCard {
  #arguments = null;

  constructor(call) {
    this.call = call;
    serial += 1;
    const fieldId = `result-${serial}`;
    this.name = h("span", { class: "call-name" }, call.name);
    this.state = h("span", { class: "call-state" });
    this.code = h("code");
    this.field = h("textarea", { id: fieldId, rows: "2", class: "field mono", spellcheck: "false", placeholder: "What the function returned" });
    this.form = h("div", { class: "call-form" }, h("label", { for: fieldId }, "Result"), this.field);
    this.result = h("pre", { class: "scroller", role: "group", "aria-label": "Result" });
    this.answered = h("div", { class: "call-answer" }, h("span", { class: "call-label" }, "Result"), this.result);
    this.element = h(
      "div",
      { class: "call", role: "group", "aria-label": `Tool call ${serial}` },
      h("div", { class: "call-head" }, h("span", { class: "call-label" }, "Tool call"), this.name, this.state, copyButton(() => this.call.arguments, "Copy the arguments")),
      h("pre", { class: "scroller", role: "group", "aria-label": "Arguments" }, this.code),
      this.form,
      this.answered,
    );
  }

  update(isRunning, canAnswer) {
    const { call } = this;
    setText(this.name, call.name || "…");
    setText(this.state, stateOf(call, isRunning));
    const text = isRunning ? call.arguments : pretty(call.arguments);
    if (text !== this.#arguments) {
      this.#arguments = text;
      this.code.replaceChildren(...highlight(text || "{}", "json"));
    }
    this.form.hidden = !canAnswer || argumentsObject(call.arguments) === null || call.result !== null;
    this.answered.hidden = call.result === null;
    setText(this.result, call.result ?? "");
  }
}

export class ToolCalls {
  #cards = [];

  /** `onResults`: called with one text (or null for an incomplete call) per call. */
  constructor(onResults) {
    this.button = h("button", { type: "submit", class: "button" }, "Send the result");
    this.list = h("div");
    this.element = h("form", { class: "calls" }, this.list, h("div", { class: "calls-foot" }, this.button));
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      onResults(this.#cards.map((card) => (argumentsObject(card.call.arguments) === null ? null : card.field.value)));
    });
  }

  update(calls, { isRunning, isLast }) {
    const present = calls.filter(Boolean);
    for (const call of present.slice(this.#cards.length)) {
      const card = new CallCard(call);
      this.#cards.push(card);
      this.list.append(card.element);
    }
    const canAnswer = isLast && !isRunning;
    for (const card of this.#cards) card.update(isRunning, canAnswer);
    const open = this.#cards.filter((card) => !card.form.hidden);
    this.button.parentElement.hidden = open.length === 0;
    setText(this.button, open.length > 1 ? "Send the results" : "Send the result");
  }
}
