/** What a screen reader hears: short states at once, a streamed answer in finished paragraphs and never more often than this. */

import { byId } from "./dom.js";

const MIN_GAP = 4000;

/** Say one thing. The same text twice is said twice. */
export function announce(text) {
  const region = byId("announcer");
  const line = document.createElement("p");
  line.textContent = text;
  region.append(line);
  // Said lines leave again, so that nobody finds old ones by reading on.
  setTimeout(() => line.remove(), 6000);
}

export class AnswerAnnouncer {
  #said = 0;
  #last = -Infinity;

  /** `texts`: paragraphs that are finished so far. */
  progress(texts, now = performance.now()) {
    if (texts.length <= this.#said || now - this.#last < MIN_GAP) return;
    this.#last = now;
    announce(texts.slice(this.#said).join("\n"));
    this.#said = texts.length;
  }

  /** The rest, and how it ended. */
  end(texts, outcome) {
    announce([...texts.slice(this.#said), outcome].join("\n"));
    this.#said = texts.length;
  }
}
