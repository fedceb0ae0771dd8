/** Conversations and their running answers. An answer goes on while another conversation is shown. */

import { ApiError } from "./api.js";
import { newId } from "./storage.js";
import { emptyAnswer, parseTools, requestBody, takeChunk } from "./wire.js";

const SAVE_EVERY = 2000;
const MAX_TRIES = 4;

const hasText = (message) => Boolean(message.content || message.reasoning || message.calls.length);

function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

/**
 * Fires "open" (another conversation is shown), "messages" (messages came or went), "message" (`message` changed),
 * "running" (an answer began or ended; `message`, `isEnd`), "unsaved" (the browser keeps nothing more).
 */
export class Chat extends EventTarget {
  #running = new Map();

  constructor({ api, store, settings, connection }) {
    super();
    Object.assign(this, { api, store, settings, connection });
    this.conversation = this.#blank();
  }

  #blank() {
    const now = Date.now();
    return { id: newId(), title: "", created: now, updated: now, messages: [] };
  }

  #fire(type, fields = {}) {
    this.dispatchEvent(Object.assign(new Event(type), fields));
  }

  /** The running answer of a conversation: {message, controller, retryNow}. */
  runningIn(id = this.conversation.id) {
    return this.#running.get(id) ?? null;
  }

  /** Show a kept conversation; null begins one. */
  open(id) {
    const kept = id === null ? this.#blank() : (this.runningIn(id)?.conversation ?? this.store.load(id));
    if (kept === null) return;
    if (!this.runningIn(kept.id)) {
      for (const message of kept.messages) {
        if (message.role === "assistant" && !message.finish && !message.error) message.finish = "interrupted";
      }
    }
    this.conversation = kept;
    this.#fire("open");
  }

  /** Say something. False when an answer still runs here. */
  send(text) {
    if (this.runningIn() || !text.trim()) return false;
    const { conversation } = this;
    if (conversation.messages.length === 0) conversation.title = titleOf(text);
    conversation.messages.push({ role: "user", content: text });
    this.#answer(conversation);
    return true;
  }

  /** Say something else instead of `message`. Returns what fell away behind it. */
  edit(message, text) {
    const { messages } = this.conversation;
    const at = messages.indexOf(message);
    if (at < 0 || this.runningIn() || !text.trim()) return [];
    const removed = messages.splice(at);
    if (at === 0) this.conversation.title = titleOf(text);
    messages.push({ role: "user", content: text });
    this.#answer(this.conversation);
    return removed;
  }

  /** Answer the last question again. */
  regenerate(message) {
    const { messages } = this.conversation;
    const at = messages.indexOf(message);
    if (at < 0 || this.runningIn()) return [];
    const removed = messages.splice(at);
    this.#answer(this.conversation);
    return removed;
  }

  /** Put messages back as they were before an edit. */
  restore(id, messages) {
    this.stop(id);
    const conversation = this.conversation.id === id ? this.conversation : this.store.load(id);
    if (conversation === null) return;
    conversation.messages = messages;
    this.#save(conversation);
    if (conversation === this.conversation) this.#fire("messages");
  }

  /** The results of an answer's calls, in their order; the model goes on. */
  giveResults(message, results) {
    if (this.runningIn()) return;
    results.forEach((result, index) => (message.calls[index].result = result));
    this.#fire("message", { message });
    this.#answer(this.conversation);
  }

  /** End the running answer; what it said stays. */
  stop(id = this.conversation.id) {
    this.runningIn(id)?.controller.abort();
  }

  remove(id) {
    this.stop(id);
    this.store.remove(id);
    if (id === this.conversation.id) this.open(null);
  }

  async #answer(conversation) {
    const message = emptyAnswer();
    const history = [...conversation.messages];
    conversation.messages.push(message);
    const running = { conversation, message, controller: new AbortController(), retryNow: null, startedAt: performance.now() };
    this.#running.set(conversation.id, running);
    conversation.updated = Date.now();
    this.#save(conversation);
    this.#fire("messages");
    this.#fire("running", { message, conversation, isEnd: false });
    try {
      parseTools(this.settings.values.tools);
      await this.#stream(running, history);
    } catch (error) {
      this.#fail(running, error);
    }
    running.message.waiting = null;
    message.times.total = (performance.now() - running.startedAt) / 1000;
    this.#running.delete(conversation.id);
    conversation.updated = Date.now();
    if (this.store.load(conversation.id)) this.#save(conversation);
    this.#fire("message", { message });
    this.#fire("running", { message, conversation, isEnd: true });
  }

  /** One answer, tried again when the server is busy and says how long. */
  async #stream(running, history) {
    for (let attempt = 1; ; attempt += 1) {
      try {
        await this.#try(running, history);
        return;
      } catch (error) {
        const isBusy = error instanceof ApiError && error.retryAfter !== null && ["busy", "unavailable"].includes(error.kind);
        if (!isBusy || hasText(running.message) || attempt >= MAX_TRIES) throw error;
        await this.#waitForTurn(running, error);
      }
    }
  }

  async #try({ conversation, message, controller }, history) {
    const body = requestBody(this.connection.model, history, this.settings.values);
    const start = performance.now();
    let saved = start;
    for await (const chunk of this.api.chat(body, controller.signal)) {
      const now = performance.now();
      if (!takeChunk(message, chunk, (now - start) / 1000)) continue;
      this.#fire("message", { message });
      if (now - saved > SAVE_EVERY) {
        saved = now;
        this.#save(conversation);
      }
    }
    message.finish ??= "stop";
  }

  #waitForTurn(running, error) {
    const { message, controller } = running;
    message.waiting = { kind: error.kind, text: error.message, until: Date.now() + 1000 * error.retryAfter };
    this.#fire("message", { message });
    return new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, 1000 * error.retryAfter);
      running.retryNow = () => {
        clearTimeout(timer);
        resolve();
      };
      controller.signal.addEventListener("abort", () => {
        clearTimeout(timer);
        reject(controller.signal.reason);
      });
    }).finally(() => {
      message.waiting = null;
      running.retryNow = null;
      this.#fire("message", { message });
    });
  }

  #fail({ message, controller }, error) {
    if (controller.signal.aborted) {
      message.finish = "stopped";
      return;
    }
    const kind = error instanceof ApiError ? error.kind : "page";
    message.error = { kind, text: error.message, code: error.code ?? null };
    if (error instanceof ApiError) this.connection.fail(error);
  }

  #save(conversation) {
    const kept = this.store.save({ ...conversation, messages: conversation.messages.map((message) => ({ ...message, waiting: undefined })) });
    if (!kept) this.#fire("unsaved");
  }
}
