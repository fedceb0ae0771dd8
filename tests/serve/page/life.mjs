/** The server goes, comes back, is busy, asks for a key; and the real command once. */

import { DESKTOP, KEY, Server, Tab, assert, freePort, sleep } from "./harness.mjs";

export async function reconnectsAfterARestart({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  const { page } = tab;
  await tab.waitForState("connected");
  await tab.ask("Hello");
  await tab.say("Tell me a story");
  await tab.answer.getByText("The lighthouse keeper counted").first().waitFor();
  await server.kill();
  await tab.waitForState("lost");
  await page.locator("#notices").getByText("The server does not answer").waitFor();
  await tab.answer.getByText("The connection was lost").waitFor();
  const partial = await tab.answer.locator(".answer-text").innerText();
  await page.locator("#prompt").fill("a draft");
  await page.locator("#prompt").press("Enter");
  assert.equal(await page.locator("#prompt").inputValue(), "a draft", "a message is not lost to a server that is gone");
  await tab.look("20-lost");
  await server.start();
  await tab.waitForState("connected");
  assert.equal(await page.locator("#notices .card").count(), 0);
  assert.equal(await page.locator(".message").count(), 4, "the conversation is still there");
  assert.equal(await tab.answer.locator(".answer-text").innerText(), partial);
  assert.equal(await page.locator("#prompt").inputValue(), "a draft");
  await tab.look("21-back");
  await page.locator("#prompt").fill("");
  await tab.answer.getByRole("button", { name: "Try again" }).click();
  await page.locator("#send", { hasText: "Stop" }).waitFor();
  await tab.answer.getByText("The lighthouse keeper counted").first().waitFor();
  await page.locator("#send").click({ delay: 600 });
  await tab.settle();
  await page.reload();
  await tab.waitForState("connected");
  assert.equal(await page.locator(".message").count(), 4, "a reload keeps the conversation");
  await tab.close();
}

export async function aStopOfTheServerEndsTheAnswerWithAnError({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  await tab.waitForState("connected");
  await tab.say("Tell me a story");
  await tab.answer.getByText("The lighthouse keeper counted").first().waitFor();
  await server.kill("SIGTERM");
  await tab.answer.locator(".card.bad").getByText("The server is not available").waitFor();
  await tab.waitForState("lost");
  await tab.look("22-stopped-server");
  await server.start();
  await tab.waitForState("connected");
  await tab.close();
}

export async function aBusyServerIsTriedAgain({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  await tab.waitForState("connected");
  const crowd = new AbortController();
  const request = { model: "tiny-dense", stream: true, messages: [{ role: "user", content: "Tell me a story" }] };
  const others = Array.from({ length: 8 }, () =>
    fetch(`${server.url}v1/chat/completions`, { method: "POST", body: JSON.stringify(request), signal: crowd.signal, headers: { "Content-Type": "application/json" } }).catch(() => null),
  );
  for (let i = 0; (await server.stats()).running < 4; i += 1) {
    assert.ok(i < 100, "the crowd has not arrived");
    await sleep(50);
  }
  await sleep(2500);
  await tab.look("23-four-rows", { axe: false });
  await tab.say("Hello");
  await tab.answer.getByText("Trying again in").waitFor();
  await tab.look("24-busy", { axe: false });
  crowd.abort();
  await Promise.all(others);
  await tab.answer.getByText("What can I do for you?").waitFor({ timeout: 20_000 });
  await tab.settle();
  assert.equal(await tab.answer.locator(".card").count(), 0);
  // The same with time to look at it.
  await tab.page.route("**/v1/chat/completions", (route) =>
    route.fulfill({ status: 429, headers: { "Retry-After": "40" }, json: { error: { message: "8 answers run or wait, and this server takes no more; try again later", type: "rate_limit_error", param: null, code: null } } }),
  );
  await tab.say("Hello");
  await tab.answer.getByText("Trying again in").waitFor();
  await tab.look("25-waiting");
  await tab.answer.getByRole("button", { name: "Give up" }).click();
  await tab.settle();
  assert.match(await tab.answer.locator(".facts").innerText(), /^stopped/);
  await tab.close();
}

export async function theLivePanelShowsTheServersNumbers({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  const { page } = tab;
  await tab.waitForState("connected");
  await tab.ask(`Hello ${"word ".repeat(300)}`);
  await tab.ask("Hello again");
  const tile = (title) => page.locator(".tile", { has: page.getByRole("heading", { name: title, exact: true }) });
  // Two questions later everything has come to rest, on the page too.
  await page.waitForResponse("**/stats");
  await page.waitForResponse("**/stats");
  const stats = await server.stats();
  const props = await (await fetch(`${server.url}props`)).json();
  const percent = (part, whole) => `${Math.round((100 * part) / whole)} %`;
  const text = async (title) => (await tile(title).innerText()).replace(/\s+/g, " ").trim();
  const whole = (n) => n.toLocaleString("en");
  assert.ok(stats.reused_tokens > 0, "the second question reuses the first");
  assert.match(await text("Generated"), /^Generated 0\.0 tokens\/s/);
  assert.match(await text("Batch rows"), new RegExp(`^Batch rows 0 of ${stats.max_rows} 0 in prefill, 0 waiting`));
  assert.ok((await text("KV pages")).startsWith(`KV pages ${stats.pages_used - stats.pages_cached} of ${stats.pages_total} in use ${stats.pages_cached} kept for reuse`), await text("KV pages"));
  assert.ok((await text("Prefix hits")).includes(`${percent(stats.reused_tokens, stats.prompt_tokens)} ${whole(stats.reused_tokens)} of ${whole(stats.prompt_tokens)}`), await text("Prefix hits"));
  assert.ok((await text("Draft acceptance")).includes(`${whole(stats.accepted)} of ${whole(stats.drafted)} drafts`), await text("Draft acceptance"));
  const rows = await tile("Memory plan").locator("tbody tr").allInnerTexts();
  assert.deepEqual(rows.map((row) => row.split("\t")[0]), [...props.memory_plan.rows.filter((row) => row.bytes > 0).map((row) => row.label), "device in all"]);
  assert.match(await text("Server"), new RegExp(`Model ${props.model.id} Weights ${props.model.weights_id} .*Finished .*${stats.requests_finished["stop-token"]} stop-token`));
  await tab.close();
}

export async function aRefusalIsShownInTheServersWords({ browser, server }) {
  const tab = await Tab.open(browser, server, DESKTOP);
  await tab.waitForState("connected");
  await tab.ask(`Much: ${"word ".repeat(4000)}`);
  await tab.answer.getByText("The server refused this request").waitFor();
  assert.match(await tab.answer.locator(".card").innerText(), /2048/);
  await tab.look("26-refused");
  assert.equal(await tab.state, "connected");
  await tab.close();
}

export async function aKeyIsAskedFor({ browser, artifact }) {
  const guarded = new Server(await freePort(), ["-m", "tests.serve.page.scripted", artifact]);
  try {
    await guarded.start("--key", KEY);
    const tab = await Tab.open(browser, guarded, DESKTOP);
    const { page } = tab;
    await tab.waitForState("key");
    await tab.look("27-key");
    await page.getByLabel("API key, kept").fill("not-the-right-key");
    await page.getByLabel("API key, kept").press("Enter");
    await page.locator("#notices").getByText("does not accept this API key").waitFor();
    await tab.look("28-key-wrong");
    assert.equal(await page.evaluate(() => document.activeElement.id), "key-field", "the focus stays at the field");
    await page.getByLabel("API key, kept").fill(KEY);
    await page.getByRole("button", { name: "Use this key" }).click();
    await tab.waitForState("connected");
    assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
    await tab.ask("Hello");
    await tab.answer.getByText("What can I do for you?").waitFor();
    assert.equal(await page.evaluate((key) => JSON.stringify({ ...localStorage }).includes(key), KEY), false, "the key is not kept");
    await page.locator("#panel-body .tiles").waitFor();
    await tab.close();
  } finally {
    await guarded.kill();
  }
}

export async function theRealCommandAnswers({ browser, artifact }) {
  const real = new Server(await freePort(), ["-c", "from ninfer_runtime.cli import main; main()", "serve", artifact, "--max-context", "512", "--max-concurrency", "2"]);
  try {
    await real.start();
    const tab = await Tab.open(browser, real, DESKTOP);
    await tab.waitForState("connected");
    await tab.ask("What is the capital of France?");
    await tab.answer.getByText("Paris").first().waitFor();
    assert.match(await tab.answer.locator(".facts").innerText(), /tokens\/s/);
    await tab.look("29-real");
    await tab.close();
  } finally {
    await real.kill();
  }
}
