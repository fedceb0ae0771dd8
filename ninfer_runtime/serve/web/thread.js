/** The messages of the shown conversation, redrawn at most once per frame. */

import { announce, AnswerAnnouncer } from "./announce.js";
import { h, markScrollers } from "./dom.js";
import { counted } from "./format.js";
import { AnswerView, UserView } from "./message.js";
import { toast } from "./toast.js";

const NEAR_END = 80;

export class Thread {
  #views = new Map();
  #changed = new Set();
  #frame = 0;
  #announcer = null;
  #follows = true;

  constructor(scroller, column, toEnd, chat) {
    Object.assign(this, { scroller, column, toEnd, chat });
    this.on = {
      regenerate: (message) => this.#replace((m) => chat.regenerate(m), message),
      results: (message, results) => chat.giveResults(message, results),
      retryNow: () => chat.runningIn()?.retryNow?.(),
      stop: () => chat.stop(),
    };
    chat.addEventListener("open", () => this.#rebuild());
    chat.addEventListener("messages", () => this.#sync());
    chat.addEventListener("message", (event) => this.#queue(event.message));
    chat.addEventListener("running", (event) => this.#running(event));
    chat.connection.addEventListener("props", () => this.column.querySelector(".welcome")?.replaceWith(this.#welcome()));
    scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    toEnd.addEventListener("click", () => {
      this.#follows = true;
      this.#scrollToEnd();
    });
    new ResizeObserver(() => {
      if (this.#follows) this.#scrollToEnd();
      if (!chat.runningIn()) markScrollers(column);
    }).observe(column);
  }

  #rebuild() {
    this.#views.clear();
    this.column.replaceChildren();
    this.#follows = true;
    this.#announcer = null;
    this.#sync();
  }

  /** One view per message, in order. */
  #sync() {
    const { messages } = this.chat.conversation;
    const present = new Set(messages);
    for (const [message, view] of this.#views) {
      if (present.has(message)) continue;
      view.element.remove();
      this.#views.delete(message);
    }
    this.column.querySelector(".welcome")?.remove();
    messages.forEach((message, index) => {
      const view = this.#viewOf(message);
      if (this.column.children[index] !== view.element) this.column.insertBefore(view.element, this.column.children[index] ?? null);
    });
    if (messages.length === 0) this.column.append(this.#welcome());
    this.#updateAll();
    this.#follows = true;
    this.#scrollToEnd();
  }

  #viewOf(message) {
    if (!this.#views.has(message)) {
      const view = message.role === "user" ? new UserView(message, (m, text) => this.#replace((old) => this.chat.edit(old, text), m)) : new AnswerView(message, this.on);
      this.#views.set(message, view);
    }
    return this.#views.get(message);
  }

  #welcome() {
    const { model, props } = this.chat.connection;
    const facts = [props?.model?.weights_id, props?.limits?.max_context && `${counted(props.limits.max_context, "token")} of context`, props?.device && `on ${props.device}`];
    return h(
      "div",
      { class: "welcome" },
      h("p", { class: "welcome-title" }, model ?? "ninfer"),
      h("p", {}, facts.filter(Boolean).join(" · ")),
      h("p", {}, "Conversations stay in this browser. The model runs on the machine that served this page."),
    );
  }

  /** Cut the conversation at a message and go on from there, with a way back. */
  #replace(cut, message) {
    const { id, messages } = this.chat.conversation;
    const before = [...messages];
    const removed = cut(message);
    document.getElementById("prompt").focus({ preventScroll: true });
    const isFailed = removed.length === 1 && removed[0].error;
    if (removed.length > 0 && !isFailed) toast("The earlier answer was replaced.", "Undo", () => this.chat.restore(id, before));
  }

  #queue(message) {
    if (!this.#views.has(message)) return;
    this.#changed.add(message);
    if (this.#frame !== 0) return;
    this.#frame = 1;
    const draw = () => {
      this.#frame = 0;
      this.#draw();
    };
    // A hidden tab has no frames, yet its answer goes on.
    if (document.hidden) setTimeout(draw, 250);
    else requestAnimationFrame(draw);
  }

  #draw() {
    for (const message of this.#changed) this.#update(message);
    this.#changed.clear();
    if (this.#follows) this.#scrollToEnd();
    const running = this.chat.runningIn();
    const view = running && this.#views.get(running.message);
    if (view) this.#announcer?.progress(view.spoken(false));
  }

  #update(message) {
    const view = this.#views.get(message);
    if (!view) return;
    const running = this.chat.runningIn();
    view.update({ isRunning: running?.message === message, isBusy: running !== null, isLast: this.chat.conversation.messages.at(-1) === message });
  }

  #updateAll() {
    for (const message of this.#views.keys()) this.#update(message);
  }

  #running({ message, conversation, isEnd }) {
    if (conversation !== this.chat.conversation) return;
    this.#updateAll();
    if (isEnd) {
      const view = this.#views.get(message);
      if (view) (this.#announcer ?? new AnswerAnnouncer()).end(view.spoken(true), view.outcome);
      this.#announcer = null;
    } else {
      this.#announcer = new AnswerAnnouncer();
      announce("Waiting for the answer");
    }
    if (this.#follows) this.#scrollToEnd();
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
    this.#follows = isAtEnd;
    this.toEnd.hidden = isAtEnd;
  }

  #scrollToEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.toEnd.hidden = true;
  }
}
