/** The inline part of markdown: code, emphasis, links. Text in, nodes out; a link leads only where `safeUrl` allows. */

import { h } from "./dom.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const PUNCTUATION = /[\p{P}\p{S}]/u;

/** More marks than this in one paragraph are text: the pairing below takes quadratic time. */
const MAX_MARKS = 400;

/** So many brackets and backticks that nothing closes are looked after; each search goes through the text behind it. */
const MAX_MISSES = 100;
const MAX_LINK = 2000;

/** The address when a click on it is harmless, otherwise null. */
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return SCHEMES.has(url.protocol) && !url.username && !url.password ? url.href : null;
  } catch {
    return null;
  }
}

function link(address, children) {
  const href = safeUrl(address);
  if (href === null) return [...children, ` (${address})`];
  return [h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, children)];
}

/** Nodes and strings of one paragraph's text. Within a link there are no others. */
export function renderInline(text, { isLabel = false } = {}) {
  return pair(scan(text, isLabel)).flatMap((part) => (part.mark === undefined ? [part] : [part.mark.repeat(part.length)]));
}

/** Strings, nodes and marks {mark, length, opens, closes}. */
function scan(text, isLabel) {
  const parts = [];
  let plain = "";
  let marks = 0;
  let misses = 0;
  const flush = () => {
    if (plain !== "") parts.push(plain);
    plain = "";
  };
  for (let at = 0; at < text.length; ) {
    const isSearch = "[`".includes(text[at]);
    const piece = isSearch && misses > MAX_MISSES ? null : pieceAt(text, at, isLabel);
    if (isSearch && piece?.nodes === undefined) misses += 1;
    if (piece === null || (piece.mark !== undefined && (marks += 1) > MAX_MARKS)) {
      plain += text[at];
      at += 1;
      continue;
    }
    if (piece.text !== undefined) {
      plain += piece.text;
    } else {
      flush();
      parts.push(...(piece.nodes ?? [piece]));
    }
    at += piece.size;
  }
  flush();
  return parts;
}

function pieceAt(text, at, isLabel) {
  switch (text[at]) {
    case "\\":
      if (text[at + 1] === "\n") return { nodes: [h("br")], size: 2 };
      return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { text: text[at + 1], size: 2 } : null;
    case "`":
      return codeAt(text, at);
    case "\n":
      return /[^ ] {2,}$/.test(text.slice(Math.max(0, at - 3), at)) ? { nodes: [h("br")], size: 1 } : null;
    case "*":
    case "_":
    case "~":
      return markAt(text, at);
    case "!":
      return text[at + 1] === "[" && !isLabel ? linkAt(text, at + 1, 1) : null;
    case "[":
      return isLabel ? null : linkAt(text, at, 0);
    case "<":
      return isLabel ? null : angleAt(text, at);
    case "h":
      return isLabel ? null : bareLinkAt(text, at);
    default:
      return null;
  }
}

function codeAt(text, at) {
  const fence = /^`+/.exec(text.slice(at, at + 200))[0];
  let end = at + fence.length;
  for (; (end = text.indexOf(fence, end)) >= 0; ) {
    const run = /^`+/.exec(text.slice(end))[0];
    if (run.length === fence.length) break;
    end += run.length;
  }
  if (end < 0) return { text: fence, size: fence.length };
  const code = text.slice(at + fence.length, end).replace(/\n/g, " ");
  const isPadded = /^ .*[^ ].* $/.test(code) || /^ `.*` $/.test(code);
  return { nodes: [h("code", {}, isPadded ? code.slice(1, -1) : code)], size: end + fence.length - at };
}

function markAt(text, at) {
  const mark = text[at];
  let length = 1;
  while (text[at + length] === mark) length += 1;
  if (mark === "~" && length !== 2) return { text: mark.repeat(length), size: length };
  const before = text[at - 1] ?? " ";
  const after = text[at + length] ?? " ";
  const leftFlanking = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
  const rightFlanking = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
  const isWord = mark === "_";
  const opens = leftFlanking && (!isWord || !rightFlanking || PUNCTUATION.test(before));
  const closes = rightFlanking && (!isWord || !leftFlanking || PUNCTUATION.test(after));
  return { mark, length, opens, closes, size: length };
}

/** `[text](address "title")`, from the bracket; `skipped` marks stand before it. Pictures become links: nothing is loaded. */
function linkAt(text, at, skipped) {
  let depth = 0;
  let end = at;
  for (const limit = Math.min(text.length, at + MAX_LINK); end < limit; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "[") depth += 1;
    else if (text[end] === "]" && (depth -= 1) === 0) break;
  }
  if (depth !== 0 || text[end + 1] !== "(") return null;
  const found = /^\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s+(?:"[^"]*"|'[^']*'|\([^)]*\)))?\s*\)/.exec(
    text.slice(end + 1, end + 1 + MAX_LINK),
  );
  if (!found) return null;
  const address = found[1] ?? found[2];
  const label = text.slice(at + 1, end);
  const children = label.trim() === "" ? [address] : renderInline(label, { isLabel: true });
  return { nodes: link(address, children), size: skipped + end + 1 - at + found[0].length };
}

function angleAt(text, at) {
  const found = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(text.slice(at, at + MAX_LINK));
  return found ? { nodes: link(found[1], [found[1]]), size: found[0].length } : null;
}

function bareLinkAt(text, at) {
  if (/[\p{L}\p{N}_]/u.test(text[at - 1] ?? " ")) return null;
  const found = /^https?:\/\/[^\s<>"'`]+/.exec(text.slice(at, at + MAX_LINK));
  if (!found) return null;
  let address = found[0].replace(/[.,;:!?*_~\]}]+$/, "");
  while (address.endsWith(")") && address.split(")").length > address.split("(").length) address = address.slice(0, -1);
  return safeUrl(address) === null ? null : { nodes: link(address, [address]), size: address.length };
}

const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": ["del", "del"] };

/** Pair closing marks with the nearest opening ones; what stays unpaired is text again. */
function pair(parts) {
  for (let close = 1; close < parts.length; close += 1) {
    while (parts[close]?.closes) {
      const open = openerOf(parts, close);
      if (open < 0) break;
      const [opening, closing] = [parts[open], parts[close]];
      const used = opening.mark === "~" || (opening.length > 1 && closing.length > 1) ? 2 : 1;
      const inner = parts.slice(open + 1, close).flatMap((part) => (part.mark === undefined ? [part] : [part.mark.repeat(part.length)]));
      const node = h(TAGS[opening.mark][used - 1], {}, inner);
      const left = opening.length > used ? [{ ...opening, length: opening.length - used }] : [];
      const right = closing.length > used ? [{ ...closing, length: closing.length - used }] : [];
      parts.splice(open, close - open + 1, ...left, node, ...right);
      close = open + left.length + 1;
    }
  }
  return parts;
}

function openerOf(parts, close) {
  const closing = parts[close];
  for (let open = close - 1; open >= 0; open -= 1) {
    const part = parts[open];
    if (part.mark !== closing.mark || !part.opens) continue;
    // CommonMark's rule of three: `*a**b*` is not a strong within.
    const isOdd = (part.closes || closing.opens) && (part.length + closing.length) % 3 === 0;
    if (!isOdd || (part.length % 3 === 0 && closing.length % 3 === 0)) return open;
  }
  return -1;
}
