/** Server-sent events from a fetch body. Chunks may end anywhere: within a line, a CRLF or a character. */

export class EventParser {
  #rest = "";
  #name = "";
  #lines = [];

  /** The events that `text` completes, as {event, data}. */
  feed(text) {
    const events = [];
    let buffer = this.#rest + text;
    // A final CR may be the first half of a CRLF.
    const held = buffer.endsWith("\r") ? "\r" : "";
    buffer = held ? buffer.slice(0, -1) : buffer;
    const lines = buffer.split(/\r\n|\r|\n/);
    this.#rest = lines.pop() + held;
    for (const line of lines) {
      if (line === "") {
        if (this.#lines.length > 0) events.push({ event: this.#name || "message", data: this.#lines.join("\n") });
        this.#name = "";
        this.#lines = [];
      } else {
        this.#take(line);
      }
    }
    return events;
  }

  #take(line) {
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.#lines.push(value);
    else if (field === "event") this.#name = value;
  }
}

/** Events of a response body, one by one. */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
