/** Puts the parts together. */

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Connection } from "./connection.js";
import { byId, icon, setText } from "./dom.js";
import { Drawers } from "./drawers.js";
import { Notices } from "./notices.js";
import { Panel } from "./panel.js";
import { SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { ConversationStore, SettingsStore } from "./storage.js";
import { setUpThemes } from "./themes.js";
import { Thread } from "./thread.js";

const SHOWN = "ninfer.shown";

for (const [id, name] of [["open-sidebar", "menu"], ["open-settings", "settings"], ["open-panel", "gauge"]]) {
  byId(id).append(icon(name));
  byId(id).title = byId(id).getAttribute("aria-label");
}
for (const button of document.querySelectorAll(".drawer-close")) button.append(icon("close"));

const settings = new SettingsStore();
const store = new ConversationStore();
const api = new Api(() => settings.key);
const connection = new Connection(api);
const chat = new Chat({ api, store, settings, connection });
setUpThemes();

const composer = new Composer(chat, settings, connection);
new Thread(byId("thread"), byId("messages"), byId("to-end"), chat);
new Notices(settings, connection, chat);
const panel = new Panel(byId("panel-body"), api, connection);
const drawers = new Drawers((isOpen) => panel.setShown(isOpen));
new Sidebar(chat, store, () => {
  drawers.closeDrawer();
  composer.focus();
});
new SettingsDialog({ settings, connection, store, chat });

function showTitle() {
  setText(byId("title"), chat.conversation.title);
  document.title = chat.conversation.title ? `${chat.conversation.title} · ninfer` : "ninfer";
}
for (const type of ["open", "messages"]) chat.addEventListener(type, showTitle);
chat.addEventListener("open", () => sessionStorage.setItem(SHOWN, chat.conversation.id));
chat.addEventListener("messages", () => sessionStorage.setItem(SHOWN, chat.conversation.id));

addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || byId("settings").open) return;
  if (drawers.closeDrawer()) return;
  if (chat.runningIn()) {
    chat.stop();
    composer.focus();
  }
});

const shown = sessionStorage.getItem(SHOWN);
chat.open(shown !== null && store.load(shown) ? shown : null);
if (matchMedia("(pointer: fine)").matches) composer.focus();
connection.meet();
