/** The settings dialog. Nothing changes before Save; Escape and Cancel leave everything as it was. */

import { byId, h, setAttribute, setText } from "./dom.js";
import { exportJson } from "./export.js";
import { count, counted } from "./format.js";
import { toast } from "./toast.js";
import { isThinking, parseTools } from "./wire.js";

const EXAMPLE_TOOLS = JSON.stringify(
  [
    {
      name: "get_weather",
      description: "Current weather of a city",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
        required: ["city"],
      },
    },
  ],
  null,
  2,
);

/** field → [label, min, max, step, whole numbers only, the server's own value] */
const NUMBERS = {
  temperature: ["Temperature", 0, 2, 0.05, false, (props) => sampling(props)?.temperature],
  topP: ["Top-p", 0, 1, 0.01, false, (props) => sampling(props)?.top_p],
  maxTokens: ["Most tokens of an answer", 1, 2 ** 31 - 1, 1, true, (props) => props?.limits?.default_max_tokens],
  thinkingBudget: ["Most tokens of thinking", 1, 2 ** 31 - 1, 1, true, () => null],
};

const sampling = (props) => props?.sampling?.thinking;

const KEYS = [
  ["Enter", "send"],
  ["Shift+Enter", "new line"],
  ["Escape", "stop the answer, close a drawer or this dialog"],
  ["Tab", "through conversations, messages, message field, live numbers"],
];

class Field {
  constructor(id, label, input, hint) {
    this.input = input;
    this.problem = h("p", { class: "problem", id: `${id}-problem`, hidden: true });
    this.hint = h("p", { class: "field-hint", id: `${id}-hint` }, hint);
    input.id = id;
    input.setAttribute("aria-describedby", `${id}-problem ${id}-hint`);
    this.element = h("div", { class: "form-field" }, h("label", { for: id }, label), input, this.problem, this.hint);
  }

  complain(text) {
    setText(this.problem, text ?? "");
    this.problem.hidden = text === null;
    setAttribute(this.input, "aria-invalid", text === null ? null : "true");
    return text === null;
  }
}

class NumberField extends Field {
  constructor(id, [label, min, max, step, isWhole, ofServer]) {
    const input = h("input", { type: "text", inputmode: isWhole ? "numeric" : "decimal", class: "field number", autocomplete: "off" });
    super(id, label, input, "");
    Object.assign(this, { min, max, step, isWhole, ofServer });
  }

  show(value, props) {
    this.input.value = value ?? "";
    const own = this.ofServer(props);
    const range = this.isWhole ? "" : `${this.min} to ${this.max}. `;
    setText(this.hint, `${range}Empty: ${own === undefined || own === null ? "no limit of its own" : `the server's ${this.isWhole ? count(own) : own}`}`);
    this.complain(null);
  }

  /** The number, null when empty, undefined when it is none (and the field says so). */
  read() {
    const text = this.input.value.trim().replace(",", ".");
    if (text === "") return this.complain(null) ? null : undefined;
    const value = Number(text);
    const isGood = Number.isFinite(value) && value >= this.min && value <= this.max && (!this.isWhole || Number.isInteger(value));
    const range = this.isWhole ? `a whole number from ${this.min}` : `a number from ${this.min} to ${this.max}`;
    return this.complain(isGood ? null : `Expected ${range}, or nothing.`) ? value : undefined;
  }
}

const section = (title, ...children) => h("fieldset", { class: "form-section" }, h("legend", {}, title), ...children);

export class SettingsDialog {
  constructor({ settings, connection, store, chat }) {
    Object.assign(this, { settings, connection, store, chat });
    this.dialog = byId("settings");
    this.numbers = Object.fromEntries(Object.entries(NUMBERS).map(([name, row]) => [name, new NumberField(`set-${name}`, row)]));
    this.thinking = h("input", { type: "checkbox", role: "switch", id: "set-thinking" });
    this.system = new Field("set-system", "System prompt", h("textarea", { class: "field", rows: "3" }), "Leads every conversation of this browser.");
    this.tools = new Field("set-tools", "Tools, as JSON", h("textarea", { class: "field mono", rows: "6", spellcheck: "false" }), "A list of functions with name, description and parameters. You enter their results by hand.");
    this.key = new Field("set-key", "API key", h("input", { type: "password", class: "field", autocomplete: "off" }), "Kept until this tab is closed, never stored.");
    this.thinkingSection = section(
      "Thinking",
      h("label", { class: "switch" }, this.thinking, h("span", { class: "switch-track" }), "Think before answering"),
      h("div", { class: "form-grid" }, this.numbers.thinkingBudget.element),
    );
    this.dialog.append(this.#form());
    byId("open-settings").addEventListener("click", () => this.open());
  }

  #form() {
    const button = (label, onclick, kind = "button") => h("button", { type: "button", class: kind, onclick }, label);
    return h(
      "form",
      { class: "sheet-form", novalidate: true, onsubmit: (event) => this.#save(event) },
      h("div", { class: "sheet-head" }, h("h2", { id: "settings-title" }, "Settings")),
      h(
        "div",
        { class: "sheet-body" },
        section("Sampling", h("div", { class: "form-grid" }, this.numbers.temperature.element, this.numbers.topP.element, this.numbers.maxTokens.element)),
        this.thinkingSection,
        section("Instructions", this.system.element),
        section("Tools", this.tools.element, button("Insert an example", () => this.#insertExample(), "quiet")),
        section("Access", this.key.element),
        section(
          "Conversations in this browser",
          h("div", { class: "form-row" }, button("Export all", () => exportJson(this.store.all(), "conversations")), button("Delete all", () => this.#removeAll())),
        ),
        section("Keys", h("dl", { class: "keys" }, KEYS.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]))),
      ),
      h("div", { class: "sheet-foot" }, button("Cancel", () => this.dialog.close(), "quiet"), h("button", { type: "submit", class: "button accent" }, "Save")),
    );
  }

  open() {
    const { values } = this.settings;
    const { props } = this.connection;
    for (const [name, field] of Object.entries(this.numbers)) field.show(values[name], props);
    this.numbers.thinkingBudget.element.hidden = props?.thinking?.has_budget === false;
    this.thinking.checked = isThinking(values, props);
    this.thinkingSection.hidden = props?.thinking?.has_switch === false;
    this.system.input.value = values.system;
    this.tools.input.value = values.tools;
    this.tools.complain(null);
    this.key.input.value = this.settings.key;
    this.dialog.showModal();
    this.dialog.querySelector(".sheet-body").scrollTop = 0;
  }

  #insertExample() {
    if (!this.tools.input.value.trim()) this.tools.input.value = EXAMPLE_TOOLS;
    this.tools.input.focus();
  }

  #readTools() {
    try {
      parseTools(this.tools.input.value);
      return this.tools.complain(null);
    } catch (error) {
      return this.tools.complain(error.message);
    }
  }

  #save(event) {
    event.preventDefault();
    const numbers = Object.fromEntries(Object.entries(this.numbers).map(([name, field]) => [name, field.read()]));
    const isGood = this.#readTools() && !Object.values(numbers).includes(undefined);
    if (!isGood) {
      this.dialog.querySelector('[aria-invalid="true"]')?.focus();
      return;
    }
    const key = this.key.input.value.trim();
    const isNewKey = key !== this.settings.key;
    this.settings.key = key;
    const thinking = this.thinking.checked === isThinking(this.settings.values, this.connection.props) ? this.settings.values.thinking : this.thinking.checked;
    this.settings.update({ ...numbers, thinking, system: this.system.input.value, tools: this.tools.input.value });
    this.dialog.close();
    if (isNewKey) this.connection.meet();
  }

  #removeAll() {
    const all = this.store.all();
    for (const conversation of all) this.chat.remove(conversation.id);
    this.chat.open(null);
    this.dialog.close();
    toast(`${counted(all.length, "conversation")} deleted.`, "Undo", () => all.reverse().forEach((conversation) => this.store.save(conversation)));
  }
}
