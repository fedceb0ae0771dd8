/** What stands above the message field when something is wrong: no server, a missing key, full storage. */

import { announce } from "./announce.js";
import { byId, h, setText } from "./dom.js";

const LABELS = {
  connecting: "Connecting",
  connected: "Connected",
  lost: "No connection",
  unwell: "Server not ready",
  key: "API key needed",
};

function keyForm(settings, connection) {
  const field = h("input", { type: "password", class: "field", id: "key-field", autocomplete: "off", required: true });
  return h(
    "form",
    {
      class: "card warn",
      onsubmit: (event) => {
        event.preventDefault();
        settings.key = field.value.trim();
        connection.meet();
      },
    },
    h("p", { class: "card-title" }, settings.key ? "The server does not accept this API key" : "The server asks for an API key"),
    h("label", { for: "key-field" }, "API key, kept until this tab is closed"),
    h("div", { class: "card-row" }, field, h("button", { type: "submit", class: "button accent" }, "Use this key")),
  );
}

const card = (kind, title, text, button) =>
  h("div", { class: `card ${kind}` }, h("p", { class: "card-title" }, title), h("p", {}, text), button ? h("div", { class: "card-foot" }, button) : null);

function retryButton(connection) {
  return h("button", { type: "button", class: "button", onclick: () => connection.retryNow() }, "Look now");
}

const NOTICES = {
  connecting: () => null,
  connected: () => null,
  lost: (settings, connection) => card("warn", "The server does not answer", "This page goes on looking for it. What you wrote is kept.", retryButton(connection)),
  unwell: (settings, connection) => card("warn", "The server is not ready", "It starts, stops or reports a fault. This page goes on looking.", retryButton(connection)),
  key: keyForm,
};

export class Notices {
  constructor(settings, connection, chat) {
    const box = byId("notices");
    const state = h("div");
    const storage = h("div");
    box.append(state, storage);
    const show = (event) => {
      byId("link-state").dataset.state = connection.state;
      setText(byId("link-label"), LABELS[connection.state]);
      const notice = NOTICES[connection.state](settings, connection);
      const hadFocus = state.contains(document.activeElement);
      state.replaceChildren(...(notice ? [notice] : []));
      if (hadFocus) (notice?.querySelector("input, button") ?? byId("prompt")).focus();
      if (event?.previous && event.previous !== "connecting") announce(notice?.querySelector(".card-title").textContent ?? LABELS[connection.state]);
    };
    connection.addEventListener("change", show);
    show();
    chat.addEventListener("unsaved", () => {
      storage.replaceChildren(card("warn", "This conversation is not kept", "The browser has no room left. Export it, or delete others."));
    });
  }
}
