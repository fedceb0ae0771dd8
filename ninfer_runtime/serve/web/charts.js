/** Small drawings in SVG: a line over time, a bar of parts, a row of cells. */

import { setAttribute, svg } from "./dom.js";

const WIDTH = 180;
const HEIGHT = 36;

/** A line of the last `length` values; gaps where there is none. The newest value is at the right. */
export class Sparkline {
  /** `isAmount`: the area under the line means something. */
  constructor(label, length, isAmount) {
    Object.assign(this, { label, length, isAmount });
    this.area = svg("path", { class: "spark-area" });
    this.line = svg("path", { class: "spark-line" });
    this.element = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, this.area, this.line);
  }

  /** `top`: value at the upper edge; without it the largest one shown. `say`: what a screen reader is told. */
  update(values, { top = null, say = "" } = {}) {
    const known = values.filter((value) => value !== null);
    const scale = top ?? Math.max(...known, 1e-9);
    const step = WIDTH / (this.length - 1);
    const x = (index) => (WIDTH - (values.length - 1 - index) * step).toFixed(1);
    const y = (value) => (HEIGHT - 1.5 - (Math.min(value, scale) / scale) * (HEIGHT - 4)).toFixed(1);
    let line = "";
    let area = "";
    let start = null;
    values.forEach((value, index) => {
      if (value === null) return;
      const isFirst = index === 0 || values[index - 1] === null;
      if (isFirst) start = index;
      line += `${isFirst ? "M" : "L"}${x(index)} ${y(value)}`;
      area += isFirst ? `M${x(index)} ${HEIGHT}L${x(index)} ${y(value)}` : `L${x(index)} ${y(value)}`;
      const isLast = index === values.length - 1 || values[index + 1] === null;
      if (isLast) area += `L${x(index)} ${HEIGHT}Z`;
      // A lone value would be a line of no length.
      if (isLast && start === index) line += "h0.01";
    });
    setAttribute(this.line, "d", line || null);
    setAttribute(this.area, "d", (this.isAmount && area) || null);
    setAttribute(this.element, "aria-label", say ? `${this.label}: ${say}` : this.label);
  }
}

/** One bar divided into parts. */
export class PartsBar {
  constructor(label, kinds) {
    this.label = label;
    this.parts = kinds.map((kind) => svg("rect", { class: `part part-${kind}`, y: 0, height: 8 }));
    this.element = svg("svg", { class: "parts", viewBox: `0 0 ${WIDTH} 8`, preserveAspectRatio: "none", role: "img", "aria-label": label }, svg("rect", { class: "part part-rest", width: WIDTH, height: 8 }), this.parts);
  }

  update(amounts, total, say) {
    let left = 0;
    this.parts.forEach((part, index) => {
      const width = total > 0 ? Math.min((amounts[index] / total) * WIDTH, WIDTH - left) : 0;
      setAttribute(part, "x", left.toFixed(2));
      setAttribute(part, "width", Math.max(width, 0).toFixed(2));
      left += width;
    });
    setAttribute(this.element, "aria-label", `${this.label}: ${say}`);
  }
}

/** One square per row of the batch. */
export class Cells {
  constructor(label) {
    this.label = label;
    this.element = svg("svg", { class: "cells", role: "img", "aria-label": label });
    this.cells = [];
  }

  /** `kinds`: one of "busy", "waiting", "free" per cell. */
  update(kinds, say) {
    if (this.cells.length !== kinds.length) {
      this.cells = kinds.map((_, index) => svg("rect", { x: index * 22, y: 0, width: 18, height: 12, rx: 2 }));
      this.element.replaceChildren(...this.cells);
      setAttribute(this.element, "viewBox", `0 0 ${Math.max(kinds.length * 22 - 4, 18)} 12`);
      setAttribute(this.element, "width", Math.max(kinds.length * 22 - 4, 18));
      setAttribute(this.element, "height", 12);
    }
    kinds.forEach((kind, index) => setAttribute(this.cells[index], "class", `cell cell-${kind}`));
    setAttribute(this.element, "aria-label", `${this.label}: ${say}`);
  }
}
