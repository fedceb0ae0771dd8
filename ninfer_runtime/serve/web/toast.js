/** A short note at the lower edge, with an action while it is there. */

import { announce } from "./announce.js";
import { byId, h } from "./dom.js";

const SHOWN = 8000;

export function toast(text, action = null, onAction = null) {
  const dismiss = () => note.remove();
  const button =
    action === null
      ? null
      : h("button", { type: "button", class: "quiet", onclick: () => { dismiss(); onAction(); } }, action);
  const note = h("div", { class: "toast" }, h("span", {}, text), button);
  byId("toasts").replaceChildren(note);
  announce(action === null ? text : `${text} ${action} is offered.`);
  let timer = setTimeout(dismiss, SHOWN);
  // Nobody loses the button while reaching for it.
  note.addEventListener("focusin", () => clearTimeout(timer));
  note.addEventListener("pointerenter", () => clearTimeout(timer));
  note.addEventListener("pointerleave", () => (timer = setTimeout(dismiss, SHOWN)));
}
