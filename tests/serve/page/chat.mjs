/** Writing, reading, stopping: what a conversation is for. */

import { Tab, DESKTOP, assert, sleep } from "./harness.mjs";

export async function answersStream({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  const { page } = tab;
  await tab.waitForState("connected");
  assert.equal(await page.getByLabel("Message", { exact: true }).count(), 1);
  await tab.look("01-empty");
  await tab.say("How does prefix reuse work?");
  await page.locator("#send", { hasText: "Stop" }).waitFor();
  await page.locator(".is-thinking .thinking-label", { hasText: "Thinking" }).or(page.locator(".thinking-label")).first().waitFor();
  await tab.look("02-thinking");
  await tab.answer.locator("h3", { hasText: "What is kept" }).waitFor();
  const early = await tab.answer.locator(".answer-text").innerText();
  await sleep(600);
  const later = await tab.answer.locator(".answer-text").innerText();
  assert.ok(later.length > early.length && later.startsWith(early.slice(0, 10)), "the text grows while it is written");
  await tab.look("03-streaming");
  await tab.settle();
  await tab.answer.locator("table").waitFor();
  assert.equal(await tab.answer.locator("tbody tr").count(), 3);
  assert.equal(await tab.answer.locator("ol > li").count(), 3);
  assert.match(await tab.answer.locator("pre").innerText(), /^def computed\(/);
  assert.match(await tab.answer.locator(".facts").innerText(), /\d+ tokens[\s\S]*tokens\/s[\s\S]*first after[\s\S]*prompt \d+/);
  assert.equal(await tab.answer.locator("a").getAttribute("href"), "https://example.org/notes");
  await tab.look("04-answered");
  await checkThinkingFolds(tab);
  await tab.answer.getByRole("button", { name: "Copy code" }).click();
  assert.match(await page.evaluate(() => navigator.clipboard.readText()), /^def computed/);
  const [body] = tab.bodies;
  assert.deepEqual([body.model, body.stream, body.stream_options, body.messages], ["tiny-dense", true, { include_usage: true }, [{ role: "user", content: "How does prefix reuse work?" }]]);
  await tab.close();
}

async function checkThinkingFolds(tab) {
  const thinking = tab.answer.locator(".thinking");
  assert.equal(await thinking.getAttribute("open"), null, "thinking is folded");
  assert.match(await thinking.locator(".thinking-label").innerText(), /^Thought for .*tokens$/);
  assert.equal(await thinking.locator(".thinking-body").isVisible(), false);
  await thinking.locator("summary").click();
  await thinking.getByText("I should say what is kept").waitFor();
  await tab.look("05-thinking-open");
  await thinking.locator("summary").click();
  assert.equal(await thinking.locator(".thinking-body").isVisible(), false);
}

export async function stopEndsTheRequest({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  await tab.waitForState("connected");
  await tab.say("Tell me a story");
  await tab.answer.getByText("The lighthouse keeper counted").first().waitFor();
  assert.equal((await server.stats()).running, 1);
  await sleep(500);
  await tab.page.locator("#send", { hasText: "Stop" }).click();
  await tab.settle(3000);
  assert.match(await tab.answer.locator(".facts").innerText(), /^stopped/);
  const text = await tab.answer.locator(".answer-text").innerText();
  for (let i = 0; (await server.stats()).running > 0; i += 1) {
    assert.ok(i < 50, "the server goes on with a stopped answer");
    await sleep(100);
  }
  assert.equal(await tab.answer.locator(".answer-text").innerText(), text);
  await tab.look("06-stopped");
  // What was said stays part of the conversation.
  await tab.ask("Hello");
  assert.deepEqual(tab.bodies[1].messages.map((message) => message.role), ["user", "assistant", "user"]);
  await tab.close();
}

export async function toolsAreShownAndAnswered({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  const { page } = tab;
  await tab.waitForState("connected");
  await page.getByRole("button", { name: "Settings" }).click();
  await page.getByRole("button", { name: "Insert an example" }).click();
  await page.getByRole("button", { name: "Save" }).click();
  await tab.say("Compare the weather in Lisbon and Oslo.");
  await tab.answer.locator(".call").nth(1).waitFor();
  await tab.look("07-calls-streaming");
  await tab.settle();
  assert.equal(tab.bodies[0].tools[0].function.name, "get_weather");
  const calls = tab.answer.locator(".call");
  assert.equal(await calls.count(), 2);
  assert.deepEqual(JSON.parse(await calls.nth(0).locator("pre").first().innerText()), { city: "Lisbon", unit: "celsius" });
  assert.deepEqual(JSON.parse(await calls.nth(1).locator("pre").first().innerText()), { city: "Oslo", unit: "celsius" });
  await tab.look("08-calls");
  await calls.nth(0).getByRole("textbox", { name: "Result" }).fill('{"temperature": 21, "sky": "sun"}');
  await calls.nth(1).getByRole("textbox", { name: "Result" }).fill('{"temperature": 4, "sky": "rain"}');
  await page.getByRole("button", { name: "Send the results" }).click();
  await tab.answer.locator("strong", { hasText: "21 °C" }).waitFor();
  await tab.settle();
  const [, answer, ...results] = tab.bodies[1].messages;
  assert.deepEqual(answer.tool_calls.map((call) => call.id), results.map((result) => result.tool_call_id));
  assert.deepEqual(results.map((result) => JSON.parse(result.content).temperature), [21, 4]);
  await tab.look("09-calls-answered");
  await tab.close();
}

export async function modelTextIsNeverMarkup({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  await tab.waitForState("connected");
  await tab.ask("Write some markup, <b>please</b> <img src=x onerror=window.broken=7>");
  await tab.answer.locator(".thinking summary").click();
  await tab.look("10-markup");
  assert.equal(await tab.page.evaluate(() => window.broken), undefined);
  assert.equal(await tab.page.locator("#messages :is(img, script, b, iframe, object)").count(), 0);
  assert.equal(await tab.page.locator('#messages a[href^="javascript"], #messages a[href^="data"]').count(), 0);
  assert.match(await tab.answer.locator(".answer-text").innerText(), /<script>window\.broken = 4<\/script>/);
  assert.match(await tab.page.locator(".user-text").innerText(), /<b>please<\/b>/);
  await tab.close();
}

export async function messagesAreEditedAndRegenerated({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  const { page } = tab;
  await tab.waitForState("connected");
  await tab.ask("Hello");
  await tab.ask("Hello once more");
  await page.locator(".message.user").first().getByRole("button", { name: "Edit this message" }).click();
  const field = page.getByRole("textbox", { name: "Edit this message" });
  assert.equal(await field.inputValue(), "Hello");
  await field.fill("Hello again");
  await tab.look("11-edit");
  await page.getByRole("button", { name: "Send again" }).click();
  await tab.settle();
  assert.equal(await page.locator(".message").count(), 2);
  await page.getByRole("button", { name: "Undo" }).click();
  await page.locator(".message").nth(3).waitFor();
  assert.equal(await page.locator(".user-text").first().innerText(), "Hello");
  await tab.answer.getByRole("button", { name: "Regenerate this answer" }).click();
  await page.locator("#send", { hasText: "Stop" }).waitFor();
  await tab.settle();
  assert.equal(await page.locator(".message").count(), 4);
  await tab.close();
}

export async function settingsReachTheRequest({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  const { page } = tab;
  await tab.waitForState("connected");
  await page.getByRole("button", { name: "Settings" }).click();
  await tab.look("12-settings");
  await page.getByLabel("Temperature").fill("3");
  await page.getByLabel("Tools, as JSON").fill("[{]");
  await page.getByRole("button", { name: "Save" }).click();
  assert.equal(await page.locator('[aria-invalid="true"]').count(), 2);
  await tab.look("13-settings-wrong");
  await page.getByLabel("Temperature").fill("0.5");
  await page.getByLabel("Tools, as JSON").fill("");
  await page.getByLabel("Most tokens of an answer").fill("25");
  await page.getByLabel("System prompt").fill("Answer briefly.");
  await page.getByRole("switch", { name: "Think before answering" }).press("Space");
  await page.getByRole("button", { name: "Save" }).click();
  await tab.ask("Tell me a story");
  const [body] = tab.bodies;
  assert.deepEqual([body.temperature, body.max_completion_tokens, body.enable_thinking], [0.5, 25, false]);
  assert.deepEqual(body.messages[0], { role: "system", content: "Answer briefly." });
  assert.ok(!("top_p" in body) && !("tools" in body));
  assert.match(await tab.answer.locator(".facts").innerText(), /^ended at the token limit[\s\S]*25 tokens/);
  assert.equal(await tab.answer.locator(".thinking").count(), 0);
  await page.reload();
  await tab.waitForState("connected");
  assert.match(await page.locator("#composer-facts").innerText(), /system prompt · temperature 0.5/);
  await tab.close();
}
