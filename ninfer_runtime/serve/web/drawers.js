/** The two side columns: beside the chat where there is room, drawers over it where there is not. */

import { byId } from "./dom.js";

/** name → from which width on it stands beside the chat. */
const SIDES = { sidebar: "(min-width: 56rem)", panel: "(min-width: 75rem)" };

const stateKey = (name) => `ninfer.${name}`;

class Side {
  constructor(name, drawers) {
    this.name = name;
    this.drawers = drawers;
    this.element = byId(name);
    this.button = byId(`open-${name}`);
    this.wide = matchMedia(SIDES[name]);
    this.button.addEventListener("click", () => this.toggle());
    this.element.querySelector(".drawer-close").addEventListener("click", () => this.close());
    this.wide.addEventListener("change", () => this.settle());
    this.settle();
  }

  get isDrawer() {
    return !this.wide.matches;
  }

  settle() {
    this.#show(!this.isDrawer && localStorage.getItem(stateKey(this.name)) !== "closed");
  }

  toggle() {
    if (this.isOpen) this.close();
    else this.open();
  }

  open() {
    this.#show(true);
    if (this.isDrawer) this.element.querySelector("button").focus();
    else localStorage.setItem(stateKey(this.name), "open");
  }

  close() {
    const hadFocus = this.element.contains(document.activeElement);
    this.#show(false);
    if (!this.isDrawer) localStorage.setItem(stateKey(this.name), "closed");
    if (hadFocus) this.button.focus();
  }

  #show(isOpen) {
    this.isOpen = isOpen;
    this.element.classList.toggle("is-open", isOpen);
    this.element.inert = !isOpen;
    this.button.setAttribute("aria-expanded", String(isOpen));
    this.drawers.settle();
  }
}

export class Drawers {
  constructor(onPanel) {
    this.onPanel = onPanel;
    this.scrim = byId("scrim");
    this.scrim.addEventListener("click", () => this.closeDrawer());
    this.sides = [];
    for (const name of Object.keys(SIDES)) this.sides.push(new Side(name, this));
    this.settle();
  }

  get drawer() {
    return this.sides.find((side) => side.isDrawer && side.isOpen) ?? null;
  }

  get isPanelOpen() {
    return this.sides.find((side) => side.name === "panel")?.isOpen ?? false;
  }

  /** True when one was open. */
  closeDrawer() {
    const { drawer } = this;
    drawer?.close();
    return drawer !== null;
  }

  /** While a drawer is open, what lies under it cannot be reached. */
  settle() {
    const { drawer } = this;
    this.scrim.hidden = drawer === null;
    byId("stage").inert = drawer !== null;
    document.querySelector(".bar").inert = drawer !== null;
    for (const side of this.sides) {
      if (side !== drawer) side.element.inert = drawer !== null || !side.isOpen;
    }
    this.onPanel(this.isPanelOpen);
  }
}
