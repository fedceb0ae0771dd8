/** Whether the server is there, what it is, and the way back to it when it is not. */

import { ApiError } from "./api.js";

const WAITS = [1000, 1500, 2000, 3000, 5000];

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
    document.addEventListener("visibilitychange", () => document.hidden || this.#wake?.());
  }

  /** Ask who is there; on failure start polling. */
  async meet() {
    try {
      this.props = await this.#props();
      this.model = this.props.model?.id ?? (await this.api.get("v1/models")).data[0].id;
    } catch (error) {
      this.fail(error);
      return;
    }
    this.#set("connected");
    this.dispatchEvent(new Event("props"));
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
    if (state === this.state) return;
    const previous = this.state;
    this.state = state;
    this.dispatchEvent(Object.assign(new Event("change"), { previous }));
  }
}
