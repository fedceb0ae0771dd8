/** From a conversation and the settings to the body of a request, and from chunks back to a message. */

/** The object of complete arguments, null while they are not. */
export function argumentsObject(text) {
  try {
    const value = JSON.parse(text === "" ? "{}" : text);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

/** The calls of an answer that were written to their end. */
export const completeCalls = (message) => message.calls.filter((call) => call.name && argumentsObject(call.arguments) !== null);

const NO_RESULT = "(no result was given)";

function answerMessages(message) {
  const calls = completeCalls(message);
  if (!message.content.trim() && calls.length === 0) return [];
  const answer = { role: "assistant", content: message.content || null };
  if (message.reasoning) answer.reasoning_content = message.reasoning;
  if (calls.length > 0) {
    answer.tool_calls = calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments || "{}" },
    }));
  }
  const results = calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result ?? NO_RESULT }));
  return [answer, ...results];
}

/** The messages of a request, system prompt first. An answer that came to nothing is left out. */
export function wireMessages(messages, system) {
  const head = system.trim() ? [{ role: "system", content: system }] : [];
  const turns = messages.map((message) => (message.role === "user" ? [{ role: "user", content: message.content }] : answerMessages(message)));
  return [...head, ...turns.flat()];
}

/** The tools of the settings, or an Error that says what is wrong. Bare functions are wrapped. */
export function parseTools(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("Expected a list: [ … ]");
  return tools.map((tool, index) => {
    const wrapped = tool?.function === undefined ? { type: "function", function: tool } : tool;
    const name = wrapped.function?.name;
    if (typeof name !== "string" || !/^[A-Za-z0-9_-]{1,64}$/.test(name)) {
      throw new Error(`Tool ${index + 1} needs a name of letters, digits, _ and -`);
    }
    return wrapped;
  });
}

/** Whether the next answer thinks first: the setting, or what the server does by itself. */
export const isThinking = (settings, props) => settings.thinking ?? props?.thinking?.is_default ?? true;

/** The request body: settings that are null or empty are not sent. */
export function requestBody(model, messages, settings) {
  const body = { model, messages: wireMessages(messages, settings.system), stream: true, stream_options: { include_usage: true } };
  if (settings.temperature !== null) body.temperature = settings.temperature;
  if (settings.topP !== null) body.top_p = settings.topP;
  if (settings.maxTokens !== null) body.max_completion_tokens = settings.maxTokens;
  if (settings.thinking !== null) body.enable_thinking = settings.thinking;
  if (settings.thinking !== false && settings.thinkingBudget !== null) body.thinking_budget = settings.thinkingBudget;
  const tools = parseTools(settings.tools);
  if (tools.length > 0) body.tools = tools;
  return body;
}

/** An answer before its first token. */
export function emptyAnswer() {
  return { role: "assistant", content: "", reasoning: "", calls: [], finish: null, usage: null, times: {}, error: null };
}

function takeCall(message, delta) {
  const index = delta.index ?? 0;
  const call = (message.calls[index] ??= { id: "", name: "", arguments: "", result: null });
  if (delta.id) call.id = delta.id;
  if (delta.function?.name) call.name = delta.function.name;
  call.arguments += delta.function?.arguments ?? "";
}

/** Add one chunk to an answer. `seconds`: since the request was sent. Returns true when text arrived. */
export function takeChunk(message, chunk, seconds) {
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  if (choice.finish_reason) message.finish = choice.finish_reason;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  const hasText = Boolean(content || reasoning || calls?.length);
  if (!hasText) return false;
  const times = message.times;
  times.first ??= seconds;
  times.last = seconds;
  if (reasoning) {
    message.reasoning += reasoning;
    times.thought = seconds - times.first;
  }
  if (content) message.content += content;
  for (const delta of calls ?? []) takeCall(message, delta);
  return true;
}

/** Tokens per second behind the first one, null when that says nothing. */
export function answerRate(message) {
  const { first, last } = message.times;
  const tokens = message.usage?.completion_tokens;
  return tokens > 1 && last > first ? (tokens - 1) / (last - first) : null;
}
