/** Requests to the server this page came from, and what can go wrong with them. */

import { readEvents } from "./sse.js";

/**
 * A request that failed.
 * kind: "network" nobody answered or the stream broke · "key" 401/403 · "busy" 429 · "unavailable" 503 · "refused" other 4xx
 *       · "failed" 5xx or an error event within the stream
 */
export class ApiError extends Error {
  constructor(kind, message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.kind = kind;
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

const KINDS = { 401: "key", 403: "key", 429: "busy", 503: "unavailable" };

function kindOf(status) {
  return KINDS[status] ?? (status < 500 ? "refused" : "failed");
}

const at = (path) => new URL(path, document.baseURI);

/** Seconds of a Retry-After header, which may be a date; null when there is none. */
export function retrySeconds(value, now = Date.now()) {
  if (value === null) return null;
  const seconds = /^\d+$/.test(value) ? Number(value) : (Date.parse(value) - now) / 1000;
  return Number.isFinite(seconds) ? Math.min(Math.max(Math.ceil(seconds), 1), 300) : null;
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy's page, or nothing: the status has to do.
  }
  const message = typeof error.message === "string" ? error.message : `The server answered ${response.status} ${response.statusText}`.trim();
  return new ApiError(kindOf(response.status), message, {
    status: response.status,
    code: error.code ?? null,
    retryAfter: retrySeconds(response.headers.get("Retry-After")),
  });
}

/** The error event of a stream: the server failed at this answer, or it stops. */
function streamError({ message = "The answer failed.", code = null }) {
  return new ApiError(code === "service_unavailable" ? "unavailable" : "failed", message, { code });
}

export class Api {
  /** `getKey`: the API key or "". */
  constructor(getKey) {
    this.getKey = getKey;
  }

  async #fetch(path, options = {}) {
    const key = this.getKey();
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(at(path), { ...options, headers, cache: "no-store", credentials: "same-origin" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ApiError("network", "The server does not answer.");
    }
    if (!response.ok) throw await errorOf(response);
    return response;
  }

  /** The JSON of a GET. */
  async get(path, { timeout = 5000 } = {}) {
    const response = await this.#fetch(path, { signal: AbortSignal.timeout(timeout) }).catch((error) => {
      throw error instanceof ApiError ? error : new ApiError("network", "The server does not answer.");
    });
    try {
      return await response.json();
    } catch {
      throw new ApiError("failed", `What answers at ${path} is not this server.`);
    }
  }

  /** The chunks of a streamed chat completion; throws ApiError, or an abort error when `signal` was aborted. */
  async *chat(body, signal) {
    const response = await this.#fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      body: JSON.stringify(body),
      signal,
    });
    let isComplete = false;
    try {
      for await (const { data } of readEvents(response.body)) {
        if (data === "[DONE]") {
          isComplete = true;
          break;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw streamError(chunk.error);
        yield chunk;
      }
    } catch (error) {
      if (error instanceof ApiError || signal.aborted) throw error;
      throw new ApiError("network", "The answer broke off; what arrived of it is kept.");
    }
    if (!isComplete) throw new ApiError("network", "The answer broke off; what arrived of it is kept.");
  }
}
