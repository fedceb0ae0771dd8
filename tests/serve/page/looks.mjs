/** Dark, small, by keyboard, without motion: the page under other conditions than its author's. */

import { DESKTOP, PHONE, Tab, assert, sleep } from "./harness.mjs";

const DARK = { colorScheme: "dark" };

/** What a browser holds after a conversation with thinking, a table, code and two tool calls. */
const KEPT = {
  "ninfer.conversation.c1": JSON.stringify({
    id: "c1",
    title: "Weather, and how reuse works",
    created: 1,
    updated: 1_700_000_000_000,
    messages: [
      { role: "user", content: "Compare the weather in Lisbon and Oslo." },
      {
        role: "assistant",
        content: "I look up both cities.",
        reasoning: "Two cities are asked for.",
        calls: [
          { id: "a", name: "get_weather", arguments: '{"city": "Lisbon", "unit": "celsius"}', result: '{"temperature": 21}' },
          { id: "b", name: "get_weather", arguments: '{"city": "Oslo", "unit": "celsius"}', result: '{"temperature": 4}' },
        ],
        finish: "tool_calls",
        usage: { prompt_tokens: 188, completion_tokens: 118, completion_tokens_details: { reasoning_tokens: 26 } },
        times: { first: 0.4, last: 2.2, thought: 0.5, total: 2.3 },
        error: null,
      },
      { role: "user", content: "Now show the code of `computed` and a table, please. A_very_long_word_without_any_place_to_break_it_that_is_wider_than_a_telephone." },
      {
        role: "assistant",
        content:
          "### What is kept\n\nThe engine keeps the **state** of a conversation.\n\n- one\n  1. nested\n- [x] done\n\n| prompt | reused | computed | milliseconds | note |\n|---|---:|---:|---:|---|\n| first turn | 0 | 812 | 41 | nothing was kept |\n| second turn | 1,024 | 37 | 6 | a long prefix |\n\n```python\ndef computed(prompt: list[int], kept: list[int]) -> int:\n    # tokens behind the longest common beginning, which a very long comment explains at some length\n    return len(prompt) - same\n```\n\n> A state says what all tokens before it have said.",
        reasoning: "A table fits.\n\nThe code should be short.",
        calls: [],
        finish: "stop",
        usage: { prompt_tokens: 370, completion_tokens: 279, prompt_tokens_details: { cached_tokens: 305 } },
        times: { first: 0.18, last: 6.1, thought: 1.2, total: 6.2 },
        error: null,
      },
    ],
  }),
  "ninfer.index": JSON.stringify([{ id: "c1", title: "Weather, and how reuse works", updated: 1_700_000_000_000 }]),
};

/** A tab that shows the kept conversation. */
async function reading(browser, server, options) {
  const origins = [{ origin: server.url.slice(0, -1), localStorage: Object.entries(KEPT).map(([name, value]) => ({ name, value })) }];
  const tab = await Tab.open(browser, server, { ...options, storageState: { cookies: [], origins } });
  await tab.page.evaluate(() => sessionStorage.setItem("ninfer.shown", "c1"));
  await tab.page.reload();
  await tab.waitForState("connected");
  await tab.answer.locator("table").waitFor();
  return tab;
}

export async function darkAndLightAreBothReadable({ browser, server }) {
  const tab = await reading(browser, server, { ...DESKTOP, ...DARK });
  const { page } = tab;
  await page.locator("#panel-body .tiles").waitFor();
  await tab.answer.locator(".thinking summary").click();
  await tab.look("40-dark");
  await page.locator(".message").first().scrollIntoViewIfNeeded();
  await tab.look("41-dark-calls");
  await page.getByRole("button", { name: "Settings" }).click();
  await tab.look("42-dark-settings");
  await page.keyboard.press("Escape");
  await page.route("**/v1/chat/completions", (route) => route.fulfill({ status: 500, json: { error: { message: "something broke", code: "internal_error" } } }));
  await tab.say("Hello");
  await tab.answer.locator(".card.bad").waitFor();
  await tab.look("43-dark-error");
  const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const dark = await background();
  await page.getByRole("button", { name: /^Theme/ }).click();
  const light = await background();
  assert.notEqual(dark, light, "the button chooses light over a dark system");
  await tab.look("44-light-chosen");
  await page.reload();
  await tab.waitForState("connected");
  assert.equal(await background(), light, "the choice is kept");
  await tab.close();
}

export async function itFitsAPhone({ browser, server }) {
  for (const [name, scheme] of [["light", {}], ["dark", DARK]]) {
    const tab = await reading(browser, server, { ...PHONE, ...scheme });
    const { page } = tab;
    await tab.look(`50-phone-${name}`);
    await page.locator(".message").first().scrollIntoViewIfNeeded();
    await tab.look(`51-phone-calls-${name}`);
    await page.locator("#open-sidebar").tap();
    await page.getByRole("button", { name: "New conversation" }).waitFor();
    await sleep(100);
    await tab.look(`52-phone-conversations-${name}`);
    await page.getByRole("button", { name: "New conversation" }).tap();
    await page.locator(".welcome").waitFor();
    assert.equal(await page.locator("#sidebar").isVisible(), false, "the drawer closes behind a choice");
    await page.locator("#open-panel").tap();
    await page.locator("#panel-body .tiles").waitFor();
    await tab.look(`53-phone-live-${name}`);
    await page.locator("#panel .drawer-close").tap();
    await page.locator("#open-settings").tap();
    await tab.look(`54-phone-settings-${name}`);
    await page.getByRole("button", { name: "Cancel" }).tap();
    await page.locator("#prompt").fill("Hello");
    await page.locator("#send").tap();
    await tab.answer.getByText("What can I do for you?").waitFor();
    await tab.settle();
    await tab.look(`55-phone-answered-${name}`);
    await checkTargets(page);
    await tab.close();
  }
}

/** Buttons in reach of a finger: 24 CSS pixels at least (WCAG 2.5.8). */
async function checkTargets(page) {
  const small = await page.evaluate(() =>
    [...document.querySelectorAll("button, a, input, summary, textarea")]
      .filter((element) => element.checkVisibility() && element.getBoundingClientRect().width > 1)
      .map((element) => [element.outerHTML.slice(0, 80), element.getBoundingClientRect()])
      .filter(([, box]) => box.height < 24)
      .map(([html, box]) => `${html} ${box.width}x${box.height}`)
      .filter((text) => !text.startsWith("<input type=\"checkbox\"")),
  );
  assert.deepEqual(small, []);
}

export async function narrowAndEnlargedWindowsNeedNoSidewaysScrolling({ browser, server }) {
  const tab = await reading(browser, server, { viewport: { width: 320, height: 640 } });
  await tab.look("60-narrow");
  await tab.page.setViewportSize({ width: 1024, height: 700 });
  await tab.look("61-tablet");
  await tab.page.locator("#open-panel").click();
  await tab.page.locator("#panel-body .tiles").waitFor();
  await tab.look("62-tablet-live");
  await tab.page.keyboard.press("Escape");
  // 1440 x 900 at 200 %, 1280 x 1024 at 400 %.
  await tab.page.setViewportSize({ width: 720, height: 450 });
  await tab.look("63-twice-as-large");
  await tab.page.setViewportSize({ width: 320, height: 256 });
  await tab.look("64-four-times-as-large");
  await tab.close();
}

/** What the keyboard is on, and whether one can see it. */
function focused(page) {
  return page.evaluate(() => {
    const element = document.activeElement;
    const own = getComputedStyle(element);
    const frame = element.closest(".composer");
    const track = element.nextElementSibling?.matches?.(".switch-track") ? getComputedStyle(element.nextElementSibling) : own;
    const isShown = own.outlineStyle !== "none" || track.outlineStyle !== "none" || (frame !== null && getComputedStyle(frame).boxShadow !== "none");
    return { id: element.id, name: element.getAttribute("aria-label") ?? element.innerText?.trim() ?? "", tag: element.tagName, isShown };
  });
}

async function tabTo(page, isIt, { back = false, most = 60 } = {}) {
  for (let presses = 0; presses < most; presses += 1) {
    await page.keyboard.press(back ? "Shift+Tab" : "Tab");
    const at = await focused(page);
    assert.ok(at.tag === "BODY" || at.isShown, `nobody sees that the keyboard is on ${JSON.stringify(at)}`);
    if (isIt(at)) return at;
  }
  assert.fail("the keyboard does not get there");
}

export async function everythingWorksByKeyboardAlone({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  const { page } = tab;
  await tab.waitForState("connected");
  assert.equal((await focused(page)).id, "prompt", "one can write at once");
  await tabTo(page, (at) => at.name.startsWith("Skip to the message field"), { back: true });
  await tab.look("70-skip-link");
  await page.keyboard.press("Enter");
  assert.equal((await focused(page)).id, "prompt");
  await page.keyboard.type("first line");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("tell a story");
  await page.keyboard.press("Enter");
  await tab.answer.getByText("The lighthouse keeper counted").first().waitFor();
  await page.keyboard.press("Escape");
  await tab.settle(3000);
  assert.equal(await page.locator(".user-text").innerText(), "first line\ntell a story");
  assert.match(await tab.answer.locator(".facts").innerText(), /^stopped/);
  assert.equal((await focused(page)).id, "prompt", "the keyboard stays at the message field");
  await tabTo(page, (at) => at.tag === "SUMMARY", { back: true });
  await page.keyboard.press("Enter");
  await tab.answer.locator(".thinking-body").waitFor();
  await tabTo(page, (at) => at.name === "Edit this message", { back: true });
  await page.keyboard.press("Enter");
  await tab.look("71-keyboard-edit");
  await page.keyboard.press("Escape");
  assert.equal((await focused(page)).name, "Edit this message", "the keyboard goes back to where it was");
  await tabTo(page, (at) => at.id === "open-settings", { back: true });
  await page.keyboard.press("Enter");
  await page.locator("#settings[open]").waitFor();
  await tabTo(page, (at) => at.id === "set-maxTokens");
  await page.keyboard.type("9");
  await tabTo(page, (at) => at.name === "Save");
  await page.keyboard.press("Enter");
  await page.locator("#settings:not([open])").waitFor({ state: "attached" });
  assert.equal((await focused(page)).id, "open-settings", "a closed dialog gives the keyboard back");
  await tabTo(page, (at) => at.id === "thinking-quick");
  await page.keyboard.press("Space");
  await tabTo(page, (at) => at.id === "prompt", { back: true });
  await page.keyboard.type("And a story again");
  await page.keyboard.press("Enter");
  await tab.answer.getByText("ended at the token limit").waitFor();
  assert.deepEqual([tab.bodies[1].max_completion_tokens, tab.bodies[1].enable_thinking], [9, false]);
  await tabTo(page, (at) => at.name.startsWith("Delete first line"), { back: true });
  await page.keyboard.press("Enter");
  await page.locator(".welcome").waitFor();
  await tabTo(page, (at) => at.name === "Undo", { back: true });
  await tab.look("72-undo");
  await page.keyboard.press("Enter");
  await page.locator(".message").nth(3).waitFor();
  await tab.close();
}

export async function motionAndContrastFollowTheSystem({ browser, server }) {
  const tab = await Tab.open(browser, server, { ...DESKTOP, reducedMotion: "reduce" });
  await tab.waitForState("connected");
  await tab.say("Tell me a story");
  await tab.answer.getByText("The lighthouse").first().waitFor();
  const moving = await tab.page.evaluate(() => document.getAnimations().length);
  assert.equal(moving, 0, "something moves though motion is not wanted");
  await tab.page.keyboard.press("Escape");
  await tab.settle();
  await tab.page.emulateMedia({ forcedColors: "active" });
  await tab.look("73-forced-colours");
  await tab.close();
}

export async function longAndOddTextIsDrawnQuickly({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  await tab.waitForState("connected");
  const slow = await tab.page.evaluate(async () => {
    const { MarkdownView } = await import("/page/markdown.js");
    const units = ["[", "![a](", "`", "` `` ", "*", "_a*", "> ", "- ", "\n- a\n\n", "| a ", "<", "&amp;", "http://", "\\", "```\n", "**a", "1. ", "\u202e", "# "];
    const found = [];
    for (const unit of units) {
      const box = document.createElement("div");
      const begun = performance.now();
      new MarkdownView(box).update(unit.repeat(Math.ceil(30_000 / unit.length)), false);
      const milliseconds = performance.now() - begun;
      if (milliseconds > 1500) found.push(`${JSON.stringify(unit)} ${Math.round(milliseconds)} ms`);
    }
    return found;
  });
  assert.deepEqual(slow, []);
  await tab.close();
}

export async function aFastAnswerIsKeptUpWith({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  await tab.waitForState("connected");
  const words = Array.from({ length: 20_000 }, (_, i) => (i % 40 === 39 ? "\n\n" : `word${i} `));
  const chunks = words.map((content) => `data: ${JSON.stringify({ choices: [{ index: 0, delta: { content }, finish_reason: null }] })}\n\n`);
  const body = `${chunks.join("")}data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n`;
  await tab.page.route("**/v1/chat/completions", (route) => route.fulfill({ headers: { "Content-Type": "text/event-stream" }, body }));
  await tab.say("Hello");
  await tab.answer.getByText("word19998").waitFor({ timeout: 10_000 });
  await tab.settle(5000);
  assert.equal(await tab.answer.locator("p").count(), 500);
  await tab.close();
}
