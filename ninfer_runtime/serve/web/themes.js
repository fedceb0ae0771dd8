/** The button that goes through system, light and dark. */

import { byId, icon } from "./dom.js";

const KEY = "ninfer.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const NAMES = { system: "that of the system", light: "light", dark: "dark" };

export function setUpThemes() {
  const button = byId("theme");
  const root = document.documentElement;
  const show = () => {
    const theme = root.dataset.theme ?? "system";
    button.replaceChildren(icon(theme));
    const label = `Theme: ${NAMES[theme]}`;
    button.setAttribute("aria-label", label);
    button.title = label;
  };
  button.addEventListener("click", () => {
    const theme = NEXT[root.dataset.theme ?? "system"];
    if (theme === "system") {
      delete root.dataset.theme;
      localStorage.removeItem(KEY);
    } else {
      root.dataset.theme = theme;
      localStorage.setItem(KEY, theme);
    }
    show();
  });
  show();
}
