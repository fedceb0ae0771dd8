/** Conversations as files. */

import { h } from "./dom.js";

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const fileName = (title, ending) => `${(title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "conversation"}.${ending}`;

/** A fence longer than any run of backticks inside. */
function fenced(text, language) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((run) => run[0].length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

function answerMarkdown(message) {
  const parts = [];
  if (message.reasoning) parts.push(`<details><summary>Thinking</summary>\n\n${message.reasoning.trim()}\n\n</details>`);
  if (message.content) parts.push(message.content.trim());
  for (const call of message.calls) {
    parts.push(`Tool call \`${call.name}\`\n\n${fenced(call.arguments, "json")}`);
    if (call.result !== null) parts.push(`Result\n\n${fenced(call.result, "")}`);
  }
  return parts.join("\n\n");
}

export function conversationMarkdown(conversation) {
  const turns = conversation.messages.map((message) =>
    message.role === "user" ? `## You\n\n${message.content}` : `## Answer\n\n${answerMarkdown(message)}`,
  );
  return `# ${conversation.title || "Conversation"}\n\n${turns.join("\n\n")}\n`;
}

export function exportMarkdown(conversation) {
  download(fileName(conversation.title, "md"), "text/markdown", conversationMarkdown(conversation));
}

export function exportJson(conversations, title) {
  const document = { format: "ninfer-conversations", version: 1, conversations };
  download(fileName(title, "json"), "application/json", `${JSON.stringify(document, null, 2)}\n`);
}
