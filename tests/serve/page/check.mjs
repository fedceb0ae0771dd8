/**
 * The page in a headless Chromium, against the scripted server and once against `ninfer-run serve`.
 *
 *     node tests/serve/page/check.mjs FILE [WORD]
 *
 * FILE is a tiny artifact; with WORD only the checks whose names hold it run. Screenshots go to build/page/shots.
 */

import path from "node:path";
import * as chat from "./chat.mjs";
import { OUT, Server, Tab, freePort, openBrowser } from "./harness.mjs";
import * as life from "./life.mjs";
import * as looks from "./looks.mjs";

const [file, word = ""] = process.argv.slice(2);
if (!file) {
  console.error("usage: node tests/serve/page/check.mjs FILE [WORD]");
  process.exit(2);
}

const artifact = path.resolve(file);
const checks = Object.entries({ ...chat, ...life, ...looks }).filter(([name]) => name.toLowerCase().includes(word.toLowerCase()));
const server = new Server(await freePort(), ["-m", "tests.serve.page.scripted", artifact]);
const browser = await openBrowser();
let failures = 0;
const started = performance.now();
try {
  for (const [name, check] of checks) {
    const begun = performance.now();
    try {
      await server.start();
      await check({ browser, server, artifact });
      console.log(`ok    ${name} (${((performance.now() - begun) / 1000).toFixed(1)} s)`);
    } catch (error) {
      failures += 1;
      console.log(`FAIL  ${name}\n${error.stack}`);
      for (const context of browser.contexts()) {
        for (const page of context.pages()) await page.screenshot({ path: path.join(OUT, `failed-${name}.png`) }).catch(() => {});
        await context.close();
      }
    }
  }
} finally {
  await server.kill();
  await browser.close();
}
console.log(`${checks.length - failures} of ${checks.length} checks passed in ${((performance.now() - started) / 1000).toFixed(0)} s; axe without violations in ${Tab.inspected.length} states`);
process.exitCode = failures > 0 || checks.length === 0 ? 1 : 0;
