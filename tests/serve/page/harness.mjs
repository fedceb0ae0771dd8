/** A browser, a server that can be killed and started again, axe, screenshots: what the checks of the page share. */

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createServer } from "node:net";
import path from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

export const ROOT = path.resolve(import.meta.dirname, "../../..");
export const OUT = path.join(ROOT, "build/page");
const require = createRequire(path.join(OUT, "package.json"));
const { chromium } = require("playwright-core");
const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const BROWSER = process.env.CHROMIUM ?? "/usr/bin/chromium";
const PYTHON = process.env.NINFER_PYTHON ?? path.join(ROOT, ".venv/bin/python");
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const START_MS = 60_000;

export const KEY = "correct-horse-battery";

/** A free port of loopback. */
export async function freePort() {
  const probe = createServer().listen(0, "127.0.0.1");
  await once(probe, "listening");
  const { port } = probe.address();
  probe.close();
  await once(probe, "close");
  return port;
}

/** A server process on one port: started, killed and started again. */
export class Server {
  #process = null;

  /** `command`: arguments of Python up to the port. */
  constructor(port, command) {
    Object.assign(this, { port, command, url: `http://127.0.0.1:${port}/` });
  }

  /** Start it unless it runs. */
  async start(...more) {
    if (this.#process !== null && this.#process.exitCode === null) return;
    const child = spawn(PYTHON, [...this.command, "--port", String(this.port), ...more], { cwd: ROOT, env: { ...process.env, OMP_NUM_THREADS: "1" }, stdio: ["ignore", "ignore", "pipe"] });
    let errors = "";
    child.stderr.on("data", (data) => (errors = (errors + data).slice(-4000)));
    this.#process = child;
    for (const end = Date.now() + START_MS; Date.now() < end; await sleep(100)) {
      assert.equal(child.exitCode, null, `the server has ended: ${errors}`);
      if ((await fetch(`${this.url}health`).catch(() => null))?.ok) return;
    }
    assert.fail(`the server has not started: ${errors}`);
  }

  /** End it without a word to anybody. */
  async kill(signal = "SIGKILL") {
    const child = this.#process;
    if (child === null) return;
    this.#process = null;
    if (child.exitCode !== null || child.signalCode !== null) return;
    const ended = once(child, "exit");
    child.kill(signal);
    await ended;
  }

  async stats(headers = {}) {
    return (await fetch(`${this.url}stats`, { headers })).json();
  }
}

export async function openBrowser() {
  return chromium.launch({ executablePath: BROWSER, args: FLAGS });
}

export const DESKTOP = { viewport: { width: 1440, height: 900 }, permissions: ["clipboard-read", "clipboard-write"] };
export const PHONE = { viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, isMobile: true, hasTouch: true };

/** One tab, with everything noted that a page must not do. */
export class Tab {
  problems = [];
  bodies = [];

  static async open(browser, server, options = {}) {
    const tab = new Tab();
    tab.server = server;
    tab.context = await browser.newContext(options);
    tab.page = await tab.context.newPage();
    tab.page.setDefaultTimeout(15_000);
    tab.page.on("pageerror", (error) => tab.problems.push(`error: ${error.message}`));
    tab.page.on("console", (message) => {
      // A refused or broken request is the subject of some checks, and the browser notes each one.
      if (message.type() === "error" && !message.text().startsWith("Failed to load resource")) tab.problems.push(`console: ${message.text()}`);
    });
    tab.page.on("request", (request) => {
      const { protocol, host } = new URL(request.url());
      if (protocol.startsWith("http") && host !== new URL(server.url).host) tab.problems.push(`a request to ${request.url()}`);
      if (request.url().endsWith("/v1/chat/completions")) tab.bodies.push(request.postDataJSON());
    });
    await tab.page.goto(server.url);
    return tab;
  }

  async close() {
    assert.deepEqual(this.problems, []);
    await this.context.close();
  }

  get state() {
    return this.page.locator("#link-state").getAttribute("data-state");
  }

  async waitForState(state) {
    await this.page.locator(`#link-state[data-state="${state}"]`).waitFor();
  }

  /** Type a message and press Enter. */
  async say(text) {
    await this.page.locator("#prompt").fill(text);
    await this.page.locator("#prompt").press("Enter");
  }

  /** The answer that was written last. */
  get answer() {
    return this.page.locator(".message.answer").last();
  }

  /** Wait until nothing is written any more. */
  async settle(timeout = 120_000) {
    await this.page.locator("#send", { hasText: "Send" }).waitFor({ timeout });
  }

  async ask(text) {
    await this.say(text);
    await this.page.locator("#send", { hasText: "Stop" }).waitFor();
    await this.settle();
  }

  async look(name, { axe = true } = {}) {
    mkdirSync(path.join(OUT, "shots"), { recursive: true });
    await this.page.screenshot({ path: path.join(OUT, "shots", `${name}.png`) });
    if (axe) await this.inspect(name);
    await this.checkWidth(name);
  }

  /** axe over the whole page: no violations, and nothing it could not decide but colours over gradients. */
  async inspect(name) {
    await this.page.evaluate(AXE);
    const { violations, passes } = await this.page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
    const found = violations.map(({ id, help, nodes }) => `${id}: ${help}: ${nodes.map((node) => node.html.slice(0, 160)).join(" | ")}`);
    assert.deepEqual(found, [], `axe, ${name}`);
    assert.ok(passes.length > 15, `axe looked at ${passes.length} rules only`);
    Tab.inspected.push(`${name} (${passes.length} rules)`);
  }

  static inspected = [];

  /** Nothing sticks out at the side. */
  async checkWidth(name) {
    const { width } = this.page.viewportSize();
    const wide = await this.page.evaluate(() => Math.max(document.documentElement.scrollWidth, document.querySelector(".thread").scrollWidth, innerWidth));
    assert.ok(wide <= width, `${name}: content ${wide} wide in a window of ${width}`);
  }
}

export { assert, sleep };
