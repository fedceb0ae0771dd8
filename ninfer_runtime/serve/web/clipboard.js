/** Buttons that copy a text and say so. */

import { announce } from "./announce.js";
import { h } from "./dom.js";

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/** Over plain HTTP from another machine browsers offer no clipboard; a selection still works. */
function copyBySelection(text) {
  const field = h("textarea", { class: "visually-hidden", readonly: true, "aria-hidden": "true", tabindex: "-1" });
  const focused = document.activeElement;
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}

/** A quiet button; `getText` is called when it is pressed. */
export function copyButton(getText, label = "Copy") {
  let timer = 0;
  const button = h("button", { type: "button", class: "quiet", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    const isCopied = await copy(getText());
    button.textContent = isCopied ? "Copied" : "Not copied";
    announce(isCopied ? "Copied" : "The browser did not allow copying");
    clearTimeout(timer);
    timer = setTimeout(() => (button.textContent = "Copy"), 1600);
  });
  return button;
}
