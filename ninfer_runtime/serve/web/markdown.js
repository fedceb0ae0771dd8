/** Blocks as elements, and a view that remakes only the blocks that a longer text changed. */

import { parseBlocks, withClosedMarks } from "./blocks.js";
import { copyButton } from "./clipboard.js";
import { h } from "./dom.js";
import { highlight } from "./highlight.js";
import { renderInline } from "./inline.js";

/** Headings of an answer stand below the page's own h1 and the message's h2. */
const TOP_LEVEL = 3;

const RENDERERS = {
  paragraph: (block) => h("p", {}, renderInline(block.text)),
  heading: (block) => h(`h${block.level ?? TOP_LEVEL}`, {}, renderInline(block.text)),
  rule: () => h("hr"),
  code: codeBlock,
  quote: (block) => h("blockquote", {}, block.blocks.map(renderBlock)),
  list: listElement,
  table: tableElement,
};

export function renderBlock(block) {
  return RENDERERS[block.type](block);
}

function codeBlock(block) {
  const code = h("code", {}, highlight(block.text, block.language));
  return h(
    "div",
    { class: "code" },
    h("div", { class: "code-head" }, h("span", { class: "code-language" }, block.language || "text"), copyButton(() => block.text, "Copy code")),
    h("pre", { class: "scroller", "aria-label": `Code, ${block.language || "text"}`, role: "group" }, code),
  );
}

function listElement(block) {
  const items = block.items.map((item) => {
    const children = item.blocks.map((inner) => (inner.type === "paragraph" && !block.isLoose ? renderInline(inner.text) : [renderBlock(inner)]));
    if (!item.isTask) return h("li", {}, children.flat());
    const state = h("span", { class: "task", role: "img", "aria-label": item.isDone ? "done" : "open" }, item.isDone ? "\u2611" : "\u2610");
    return h("li", { class: "task-item" }, state, " ", children.flat());
  });
  return block.isOrdered ? h("ol", { start: block.start === 1 ? null : block.start }, items) : h("ul", {}, items);
}

function tableElement(block) {
  const cell = (tag, text, column, props = {}) => h(tag, { class: `align-${block.align[column]}`, ...props }, renderInline(text));
  const head = h("tr", {}, block.head.map((text, column) => cell("th", text, column, { scope: "col" })));
  const rows = block.rows.map((row) => h("tr", {}, row.map((text, column) => cell("td", text, column))));
  const table = h("table", {}, h("thead", {}, head), h("tbody", {}, rows));
  return h("div", { class: "table-box scroller", role: "group", "aria-label": "Table" }, table);
}

/** Levels that never skip one, whatever ranks the model chose. */
function levelHeadings(blocks) {
  let last = TOP_LEVEL - 1;
  const top = Math.min(...blocks.filter((block) => block.type === "heading").map((block) => block.rank), 6);
  for (const block of blocks) {
    if (block.type !== "heading") continue;
    block.level = Math.min(TOP_LEVEL + block.rank - top, last + 1, 6);
    last = block.level;
  }
  return blocks;
}

export class MarkdownView {
  #blocks = [];
  #text = null;

  constructor(element) {
    this.element = element;
  }

  /** The text so far. Blocks that did not change keep their nodes, so a selection in them survives. */
  update(text, isEnd = true) {
    const shown = isEnd ? text : withClosedMarks(text);
    if (shown === this.#text) return;
    this.#text = shown;
    const blocks = levelHeadings(parseBlocks(shown));
    let same = 0;
    while (same < blocks.length && same < this.#blocks.length && isSame(blocks[same], this.#blocks[same])) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...blocks.slice(same).map(renderBlock));
    this.#blocks = blocks;
  }

  /** Plain text of the blocks that will not change any more (all of them at the end), for reading aloud. */
  settledTexts(isEnd) {
    const settled = isEnd ? this.#blocks.length : Math.max(this.#blocks.length - 1, 0);
    return this.#blocks.slice(0, settled).map((block, index) => {
      if (block.type === "code") return `Code, ${block.text.split("\n").length} lines.`;
      return this.element.childNodes[index].textContent;
    });
  }
}

function isSame(a, b) {
  return a.type === b.type && a.source === b.source && a.level === b.level && a.isClosed === b.isClosed;
}
