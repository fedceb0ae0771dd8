/** The page's modules that need no browser: node --test tests/serve/page/modules.test.mjs */

import assert from "node:assert/strict";
import test from "node:test";

const web = new URL("../../../ninfer_runtime/serve/web/", import.meta.url);
const { parseBlocks, withClosedMarks } = await import(new URL("blocks.js", web));
const { EventParser } = await import(new URL("sse.js", web));
const { StatsHistory, between } = await import(new URL("stats.js", web));
const wire = await import(new URL("wire.js", web));
const format = await import(new URL("format.js", web));
const { retrySeconds } = await import(new URL("api.js", web));

test("events are the same however the stream is cut", () => {
  const text = ': note\r\nevent: a\r\ndata: 1\r\ndata: 2\r\n\r\ndata: {"é": 1}\n\ndata:x\rdata: y\r\rdata: left';
  const whole = new EventParser().feed(text);
  assert.deepEqual(whole, [{ event: "a", data: "1\n2" }, { event: "message", data: '{"é": 1}' }, { event: "message", data: "x\ny" }]);
  for (let first = 0; first <= text.length; first += 1) {
    for (let second = first; second <= text.length; second += 1) {
      const parser = new EventParser();
      const parts = [text.slice(0, first), text.slice(first, second), text.slice(second)];
      assert.deepEqual(parts.flatMap((part) => parser.feed(part)), whole, `cut at ${first} and ${second}`);
    }
  }
});

const TYPES = [
  ["a\nb\n\nc", "paragraph paragraph"],
  ["# t\ntext\n## u", "heading paragraph heading"],
  ["```py\nx\n\ny\n```\nz", "code paragraph"],
  ["~~~\n```\n~~~", "code"],
  ["- a\n- b\n\n1. c", "list list"],
  ["> a\nb\n\nc", "quote paragraph"],
  ["|a|b|\n|-|-|\n|1|2|", "table"],
  ["a | b\nnot a rule", "paragraph"],
  ["---", "rule"],
  ["<script>alert(1)</script>", "paragraph"],
];

test("blocks are told apart", () => {
  for (const [text, types] of TYPES) assert.equal(parseBlocks(text).map((block) => block.type).join(" "), types, text);
});

test("blocks that are followed by another one never change while a text grows", () => {
  const text = "# t\n\npara *one*\n\n- a\n  - b\n\n```c\nint x;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> q\n\nend";
  const final = parseBlocks(text).map((block) => block.source);
  for (let end = 0; end <= text.length; end += 1) {
    const settled = parseBlocks(text.slice(0, end)).slice(0, -2).map((block) => block.source);
    assert.deepEqual(settled, final.slice(0, settled.length), `after ${end} characters`);
  }
});

test("nesting has an end", () => {
  let [block] = parseBlocks(`${"> ".repeat(5000)}deep`);
  for (let depth = 0; block.type === "quote"; depth += 1) {
    assert.ok(depth < 50);
    [block] = block.blocks;
  }
  assert.equal(block.type, "paragraph");
});

test("a list knows its start, its tasks and its loose items", () => {
  const [ordered] = parseBlocks("3. a\n4. b");
  assert.deepEqual([ordered.isOrdered, ordered.start, ordered.isLoose, ordered.items.length], [true, 3, false, 2]);
  const [tasks] = parseBlocks("- [x] a\n- [ ] b");
  assert.deepEqual(tasks.items.map((item) => [item.isTask, item.isDone]), [[true, true], [true, false]]);
  assert.equal(parseBlocks("- a\n\n- b")[0].isLoose, true);
});

const CLOSED = [
  ["a **", "a "],
  ["a **b", "a **b**"],
  ["a **b*", "a **b**"],
  ["a **b** c", "a **b** c"],
  ["x `co", "x `co`"],
  ["x `", "x "],
  ["2 ** 3", "2 ** 3"],
  ["* item", "* item"],
  ["```\nx **y", "```\nx **y"],
  ["**a**\nb **c", "**a**\nb **c**"],
];

test("what a growing line has opened is closed", () => {
  for (const [text, shown] of CLOSED) assert.equal(withClosedMarks(text), shown, text);
});

const settings = { temperature: null, topP: null, maxTokens: null, thinking: null, thinkingBudget: null, system: "", tools: "" };

test("a request names what the settings name", () => {
  const messages = [{ role: "user", content: "Hi" }];
  assert.deepEqual(wire.requestBody("m", messages, settings), { model: "m", messages, stream: true, stream_options: { include_usage: true } });
  const body = wire.requestBody("m", messages, { ...settings, temperature: 0, maxTokens: 5, thinking: false, thinkingBudget: 9, system: "S", tools: '[{"name": "f"}]' });
  assert.deepEqual([body.temperature, body.max_completion_tokens, body.enable_thinking, body.thinking_budget], [0, 5, false, undefined]);
  assert.deepEqual(body.messages[0], { role: "system", content: "S" });
  assert.deepEqual(body.tools, [{ type: "function", function: { name: "f" } }]);
});

test("an answer is put together from its chunks and sent back with its results", () => {
  const answer = wire.emptyAnswer();
  const delta = (fields, seconds) => wire.takeChunk(answer, { choices: [{ delta: fields }] }, seconds);
  delta({ role: "assistant", content: "" }, 0);
  delta({ reasoning_content: "hm" }, 1);
  delta({ content: "see" }, 2);
  delta({ tool_calls: [{ index: 0, id: "c1", function: { name: "f", arguments: "" } }] }, 3);
  delta({ tool_calls: [{ index: 0, function: { arguments: '{"a":' } }] }, 3);
  assert.deepEqual(wire.completeCalls(answer), []);
  delta({ tool_calls: [{ index: 0, function: { arguments: " 1}" } }] }, 4);
  wire.takeChunk(answer, { choices: [], usage: { completion_tokens: 10 } }, 4);
  assert.equal(wire.answerRate(answer), 3);
  answer.calls[0].result = "ok";
  const [sent, result] = wire.wireMessages([answer], "");
  assert.deepEqual([sent.content, sent.reasoning_content, sent.tool_calls[0].function], ["see", "hm", { name: "f", arguments: '{"a": 1}' }]);
  assert.deepEqual(result, { role: "tool", tool_call_id: "c1", content: "ok" });
  assert.deepEqual(wire.wireMessages([wire.emptyAnswer()], ""), [], "an answer that came to nothing is left out");
});

test("tools that cannot be sent are told why", () => {
  for (const text of ["{", "{}", "[{}]", '[{"name": "a b"}]', "[null]"]) assert.throws(() => wire.parseTools(text), Error, text);
});

const STATS = { instance: "a", uptime_seconds: 1, generated_tokens: 0, computed_prefill_tokens: 0, row_rounds: 0, rounds: 0, accepted: 0, drafted: 0, reused_tokens: 0, prompt_tokens: 0 };

test("rates are differences between answers of one server", () => {
  const later = { ...STATS, uptime_seconds: 3, generated_tokens: 50, rounds: 10, row_rounds: 25, drafted: 8, accepted: 6 };
  assert.deepEqual(between(STATS, later), { generated: 25, prefilled: 0, rows: 2.5, acceptance: 0.75, reuse: null });
  const history = new StatsHistory();
  history.add(STATS);
  history.add(later);
  assert.equal(history.latest("generated"), 25);
  history.add({ ...STATS, instance: "b", uptime_seconds: 9 });
  assert.deepEqual(history.samples, [], "another server begins anew");
});

test("numbers read well", () => {
  assert.deepEqual([0.314, 12.4, 125, 3600, 90000].map(format.duration), ["0.31 s", "12 s", "2 min 05 s", "1 h 00 min", "1 d 1 h"]);
  assert.deepEqual([0, 1023, 1536, 217 * 2 ** 20, 3 * 2 ** 40].map(format.bytes), ["0 B", "1,023 B", "1.5 KiB", "217 MiB", "3.0 TiB"]);
  assert.deepEqual([0, 99.94, 99.96, 1234.5].map(format.rate), ["0.0", "99.9", "100", "1,235"]);
  assert.deepEqual([null, "7", "0", "junk", "Thu, 01 Jan 1970 00:00:30 GMT"].map((value) => retrySeconds(value, 10_000)), [null, 7, 1, null, 20]);
});
