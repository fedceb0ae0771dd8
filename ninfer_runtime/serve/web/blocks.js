/** Markdown text to blocks: headings, paragraphs, lists, quotes, tables, fenced code. HTML is ordinary text. */

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*)|[ \t]*)$/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const TASK = /^\[([ xX])\][ \t]+/;

/** Quotes and lists within each other; what is deeper stays text. */
const MAX_DEPTH = 12;

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

/** Blocks of a text, each with the `source` it was made from. */
export function parseBlocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  return parseLines(lines, 0);
}

const STRONG = /\*\*(?=\S)|(?<=\S)\*\*/g;

/** A text that still grows: what its last line has opened is closed, so that `**bo` is not two stars for a while. */
export function withClosedMarks(text) {
  const start = text.lastIndexOf("\n") + 1;
  const line = text.slice(start).trimEnd();
  if (!/[*`]/.test(line) || parseBlocks(text).at(-1)?.type === "code") return text;
  return text.slice(0, start) + closed(line);
}

function closed(line) {
  const hasOpenCode = line.split("`").length % 2 === 0;
  if (hasOpenCode) return line.endsWith("`") ? line.slice(0, -1) : `${line}\``;
  // Stars at the end are the beginning of a mark, or half of one.
  const bare = line.replace(/\*+$/, "");
  const isOpen = (bare.replace(/`[^`]*`/g, "").match(STRONG) ?? []).length % 2 === 1;
  if (isOpen) return `${bare}**`;
  return /(?:^|\s)$/.test(bare) ? bare : line;
}

function parseLines(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, next] = parseBlock(lines, at, depth);
    block.source = lines.slice(at, next).join("\n");
    blocks.push(block);
    at = next;
  }
  return blocks;
}

function parseBlock(lines, at, depth) {
  const line = lines[at];
  let found;
  if ((found = FENCE.exec(line))) return fencedCode(lines, at, found);
  if ((found = HEADING.exec(line))) return [{ type: "heading", rank: found[1].length, text: found[2] ?? "" }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && (found = ITEM.exec(line))) return list(lines, at, depth);
  if (line.includes("|") && at + 1 < lines.length && TABLE_RULE.test(lines[at + 1])) {
    const head = cells(line);
    const rules = cells(lines[at + 1]);
    if (head.length === rules.length) return table(lines, at, head, rules);
  }
  return paragraph(lines, at);
}

function fencedCode(lines, at, [, indent, fence, info]) {
  const closing = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}[ \\t]*$`);
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const code = [];
  let next = at + 1;
  for (; next < lines.length && !closing.test(lines[next]); next += 1) code.push(lines[next].replace(strip, ""));
  const isClosed = next < lines.length;
  return [{ type: "code", language: info.trim().split(/\s/)[0], text: code.join("\n"), isClosed }, isClosed ? next + 1 : next];
}

function quote(lines, at, depth) {
  const inner = [];
  let next = at;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (QUOTE.test(line)) inner.push(line.replace(QUOTE, ""));
    // A line that goes on with a quoted paragraph may leave the mark out.
    else if (isBlank(line) || startsBlock(line) || isBlank(inner.at(-1))) break;
    else inner.push(line);
  }
  return [{ type: "quote", blocks: parseLines(inner, depth + 1) }, next];
}

function list(lines, at, depth) {
  const [, , mark] = ITEM.exec(lines[at]);
  const isOrdered = mark.length > 1;
  const kind = mark.at(-1);
  const items = [];
  let isLoose = false;
  let next = at;
  while (next < lines.length) {
    const found = ITEM.exec(lines[next]);
    if (!found || found[2].at(-1) !== kind || found[2].length > 1 !== isOrdered || RULE.test(lines[next])) break;
    const [item, after, hasGap] = listItem(lines, next, found);
    items.push(item);
    isLoose ||= hasGap && after < lines.length && (ITEM.exec(lines[after])?.[2].at(-1) === kind || item.includes(""));
    next = after;
  }
  const block = { type: "list", isOrdered, start: isOrdered ? Number.parseInt(mark, 10) : 1, isLoose, items: [] };
  block.items = items.map((item) => {
    const task = TASK.exec(item[0]);
    const own = task ? [item[0].slice(task[0].length), ...item.slice(1)] : item;
    return { isTask: task !== null, isDone: task !== null && task[1] !== " ", blocks: parseLines(own, depth + 1) };
  });
  return [block, next];
}

/** [lines of the item without its indent, index behind it, a blank line follows or lies within]. */
function listItem(lines, at, [, indent, mark, gap = " ", first = ""]) {
  const width = indent.length + mark.length + (gap.length > 4 ? 1 : gap.length);
  // Two spaces are enough to nest: that is how models write below "1.".
  const enough = Math.min(width, indent.length + 2);
  const own = [first];
  let hasGap = false;
  let next = at + 1;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (isBlank(line)) {
      const following = lines.slice(next + 1).find((other) => !isBlank(other));
      if (following === undefined || indentOf(following) < enough) {
        hasGap = true;
        while (next < lines.length && isBlank(lines[next])) next += 1;
        break;
      }
      hasGap = true;
      own.push("");
    } else if (indentOf(line) >= enough) {
      own.push(line.slice(Math.min(indentOf(line), width)));
    } else if (startsBlock(line) || isBlank(own.at(-1))) {
      break;
    } else {
      own.push(line.trimStart());
    }
  }
  return [own, next, hasGap];
}

/** The cells of a table row; `\|` and bars within code do not divide. */
function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  const parts = [""];
  let isCode = false;
  for (let i = 0; i < row.length; i += 1) {
    if (row[i] === "\\" && row[i + 1] === "|") {
      parts[parts.length - 1] += "|";
      i += 1;
    } else if (row[i] === "|" && !isCode) {
      parts.push("");
    } else {
      if (row[i] === "`") isCode = !isCode;
      parts[parts.length - 1] += row[i];
    }
  }
  return parts.map((part) => part.trim());
}

function table(lines, at, head, rules) {
  const align = rules.map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : "left"));
  const rows = [];
  let next = at + 2;
  for (; next < lines.length && !isBlank(lines[next]) && lines[next].includes("|"); next += 1) {
    const row = cells(lines[next]);
    rows.push(head.map((_, column) => row[column] ?? ""));
  }
  return [{ type: "table", head, align, rows }, next];
}

function paragraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && !isBlank(lines[next]) && !startsBlock(lines[next])) next += 1;
  return [{ type: "paragraph", text: lines.slice(at, next).join("\n") }, next];
}
