/** The list of conversations: open, delete with a way back, export. */

import { byId, h, icon } from "./dom.js";
import { exportJson, exportMarkdown } from "./export.js";
import { when } from "./format.js";
import { toast } from "./toast.js";

export class Sidebar {
  /** `onChoice`: called when a conversation was chosen, so that a drawer can close. */
  constructor(chat, store, onChoice) {
    Object.assign(this, { chat, store, onChoice });
    this.list = byId("conversation-list");
    this.foot = h(
      "div",
      { class: "sidebar-foot" },
      h("span", { class: "side-label" }, "Export"),
      h("button", { type: "button", class: "quiet", onclick: () => exportMarkdown(chat.conversation) }, "Markdown"),
      h("button", { type: "button", class: "quiet", onclick: () => exportJson([chat.conversation], chat.conversation.title) }, "JSON"),
    );
    byId("sidebar").append(this.foot);
    byId("new-conversation").addEventListener("click", () => this.#open(null));
    store.addEventListener("change", () => this.update());
    chat.addEventListener("open", () => this.update());
    chat.addEventListener("running", () => this.update());
    this.update();
  }

  #open(id) {
    this.chat.open(id);
    this.onChoice();
  }

  update() {
    const focused = document.activeElement?.closest?.("[data-conversation]")?.dataset.conversation;
    const rows = this.store.list();
    this.list.replaceChildren(...rows.map((row) => this.#row(row)));
    if (rows.length === 0) this.list.append(h("li", { class: "list-empty" }, "None yet."));
    this.foot.hidden = this.chat.conversation.messages.length === 0;
    if (focused) this.list.querySelector(`[data-conversation="${CSS.escape(focused)}"] .row-open`)?.focus();
  }

  #row({ id, title, updated }) {
    const isCurrent = id === this.chat.conversation.id;
    const isRunning = this.chat.runningIn(id) !== null;
    const name = title || "Untitled";
    return h(
      "li",
      { class: "row", "data-conversation": id },
      h(
        "button",
        { type: "button", class: "row-open", "aria-current": isCurrent ? "true" : null, onclick: () => this.#open(id) },
        h("span", { class: "row-title" }, name),
        h("span", { class: "row-date" }, isRunning ? "answering" : when(updated)),
      ),
      h("button", { type: "button", class: "icon-button row-delete", "aria-label": `Delete ${name}`, onclick: () => this.#remove(id) }, icon("close")),
    );
  }

  #remove(id) {
    const conversation = this.store.load(id);
    const wasShown = id === this.chat.conversation.id;
    this.chat.remove(id);
    byId("new-conversation").focus();
    if (conversation === null) return;
    toast("Conversation deleted.", "Undo", () => {
      this.store.save(conversation);
      if (wasShown) this.#open(id);
    });
  }
}
