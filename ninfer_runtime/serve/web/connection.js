/** Whether the server is there, what it is, and the way back to it when it is not. */

import { ApiError } from "./api.js";

const WAITS = [1000, 1500, 2000, 3000, 5000];

/** While all is well, nobody may ask anything for long; this tells that the server has gone, or is another one now. */
const HEARTBEAT = 15_000;

/**
 * state: "connecting" · "connected" · "lost" nobody answers · "unwell" /health says so · "key" an API key is asked for
 * Fires "change" when the state changes and "props" when a server was met (again).
 */
export class Connection extends EventTarget {
  state = "connecting";
  props = null;
  model = null;
  #isPolling = false;
  #wake = null;

  constructor(api) {
    super();
    this.api = api;
    addEventListener("online", () => this.#wake?.());
    document.addEventListener("visibilitychange", () => this.#beat());
    setInterval(() => this.#beat(), HEARTBEAT);
  }

  #beat() {
    if (document.hidden) return;
    if (this.state === "connected") this.meet();
    else this.#wake?.();
  }

  /** Ask who is there; on failure start polling. */
  async meet() {
    let props, model;
    try {
      props = await this.#props();
      model = props.model?.id ?? (await this.api.get("v1/models")).data[0].id;
    } catch (error) {
      this.fail(error);
      return;
    }
    const isNew = this.props === null || props.instance !== this.props.instance || model !== this.model;
    Object.assign(this, { props, model });
    this.#set("connected");
    if (isNew) this.dispatchEvent(new Event("props"));
  }

  async #props() {
    try {
      return await this.api.get("props");
    } catch (error) {
      if (error.kind === "refused") return {};
      throw error;
    }
  }

  /** A request failed: does that say something about the connection? */
  fail(error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.kind === "key") this.#set("key");
    else if (error.kind === "network") this.#poll("lost");
    else if (error.kind === "unavailable" && this.state !== "connected") this.#poll("unwell");
    else if (this.state === "connecting") this.#poll("unwell");
    else if (error.code === "model_not_found") this.meet();
  }

  /** Look again now. */
  retryNow() {
    this.#wake?.();
  }

  async #poll(state) {
    this.#set(state);
    if (this.#isPolling) return;
    this.#isPolling = true;
    for (let attempt = 0; ; attempt += 1) {
      await this.#wait(WAITS[Math.min(attempt, WAITS.length - 1)]);
      try {
        await this.api.get("health");
        break;
      } catch (error) {
        this.#set(error.kind === "network" ? "lost" : "unwell");
      }
    }
    this.#isPolling = false;
    await this.meet();
  }

  #wait(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  #set(state) {
    // A refused key is news even behind another refused key.
    if (state === this.state && state !== "key") return;
    const previous = this.state;
    this.state = state;
    this.dispatchEvent(Object.assign(new Event("change"), { previous }));
  }
}
