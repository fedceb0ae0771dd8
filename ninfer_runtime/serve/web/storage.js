/** What stays in the browser: conversations and settings in localStorage, the key in sessionStorage. */

const INDEX = "ninfer.index";
const SETTINGS = "ninfer.settings";
const KEY = "ninfer.key";
const DRAFT = "ninfer.draft";
const conversationKey = (id) => `ninfer.conversation.${id}`;

function readJson(area, key, fallback) {
  try {
    const text = area.getItem(key);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** False when the browser keeps nothing: storage is full or switched off. */
function write(area, key, text) {
  try {
    area.setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (n) => n.toString(16).padStart(2, "0")).join("");

export class ConversationStore extends EventTarget {
  constructor() {
    super();
    addEventListener("storage", (event) => {
      if (event.key === INDEX) this.dispatchEvent(new Event("change"));
    });
  }

  /** [{id, title, updated}], the latest first. */
  list() {
    const rows = readJson(localStorage, INDEX, []);
    return (Array.isArray(rows) ? rows : []).filter((row) => typeof row?.id === "string").sort((a, b) => b.updated - a.updated);
  }

  load(id) {
    const conversation = readJson(localStorage, conversationKey(id), null);
    return Array.isArray(conversation?.messages) ? conversation : null;
  }

  /** False when the browser could not keep it. */
  save(conversation) {
    const { id, title, updated } = conversation;
    const rows = [{ id, title, updated }, ...this.list().filter((row) => row.id !== id)];
    const kept = write(localStorage, conversationKey(id), JSON.stringify(conversation)) && write(localStorage, INDEX, JSON.stringify(rows));
    this.dispatchEvent(new Event("change"));
    return kept;
  }

  remove(id) {
    localStorage.removeItem(conversationKey(id));
    write(localStorage, INDEX, JSON.stringify(this.list().filter((row) => row.id !== id)));
    this.dispatchEvent(new Event("change"));
  }

  all() {
    return this.list().map((row) => this.load(row.id)).filter((conversation) => conversation !== null);
  }
}

/** null: the field is not sent, the server decides. */
export const DEFAULT_SETTINGS = Object.freeze({
  temperature: null,
  topP: null,
  maxTokens: null,
  thinking: null,
  thinkingBudget: null,
  system: "",
  tools: "",
});

export class SettingsStore extends EventTarget {
  #values = { ...DEFAULT_SETTINGS, ...readJson(localStorage, SETTINGS, {}) };

  get values() {
    return this.#values;
  }

  update(changes) {
    this.#values = { ...this.#values, ...changes };
    write(localStorage, SETTINGS, JSON.stringify(this.#values));
    this.dispatchEvent(new Event("change"));
  }

  get key() {
    try {
      return sessionStorage.getItem(KEY) ?? "";
    } catch {
      return "";
    }
  }

  set key(text) {
    if (text === "") sessionStorage.removeItem(KEY);
    else write(sessionStorage, KEY, text);
  }
}

/** The text in the message field, kept over a reload of this tab. */
export const draft = {
  get text() {
    return sessionStorage.getItem(DRAFT) ?? "";
  },
  set text(value) {
    write(sessionStorage, DRAFT, value);
  },
};
