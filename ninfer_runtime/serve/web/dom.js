/** Elements built node by node. Text only ever enters the page as text nodes and attribute values. */

const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("button", {class: "button", onclick: f, "aria-label": "Close"}, "text", child)`; null children are left out. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same in the SVG namespace. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Set text only when it differs: an unchanged node keeps the reader's selection. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set or, with null, remove an attribute. */
export function setAttribute(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

const ICONS = {
  menu: ["M3 5h14M3 10h14M3 15h9"],
  gauge: ["M3 14.5a7 7 0 1 1 14 0", "M10 14.5l3.5-5"],
  settings: ["M3 6h8M15 6h2M3 14h2M9 14h8", "M13 4v4M7 12v4"],
  close: ["M5 5l10 10M15 5L5 15"],
  system: ["M10 3.5a6.5 6.5 0 1 0 0 13z", "M10 3.5a6.5 6.5 0 0 1 0 13"],
  light: ["M10 6.8a3.2 3.2 0 1 0 0 6.4 3.2 3.2 0 0 0 0-6.4z", "M10 2v2M10 16v2M2 10h2M16 10h2M4.3 4.3l1.4 1.4M14.3 14.3l1.4 1.4M15.7 4.3l-1.4 1.4M5.7 14.3l-1.4 1.4"],
  dark: ["M16 12.2A6.6 6.6 0 0 1 7.8 4a6.6 6.6 0 1 0 8.2 8.2z"],
};

/** A line drawing of 20 × 20, hidden from screen readers: its button has a label. */
export function icon(name) {
  return svg(
    "svg",
    { viewBox: "0 0 20 20", width: 20, height: 20, class: "icon", "aria-hidden": "true", focusable: "false" },
    ICONS[name].map((d) => svg("path", { d })),
  );
}

/** Code blocks and tables that overflow can be reached and scrolled by keyboard; those that fit are no tab stops. */
export function markScrollers(root) {
  for (const box of root.querySelectorAll(".scroller")) {
    const overflows = box.scrollWidth > box.clientWidth + 1;
    setAttribute(box, "tabindex", overflows ? "0" : null);
  }
}
