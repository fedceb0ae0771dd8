/** Comments, strings, numbers and keywords of the usual languages, told apart well enough to read by. */

import { h } from "./dom.js";

const HASH = "#[^\\n]*";
const SLASHES = "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)";
const DASHES = "--[^\\n]*";
const QUOTED = "\"(?:\\\\.|[^\"\\\\\\n])*\"?|'(?:\\\\.|[^'\\\\\\n])*'?";
const DOUBLE = '"(?:\\\\.|[^"\\\\\\n])*"?';
const BACKTICKS = "`(?:\\\\.|[^`\\\\])*`?";
const TRIPLE = "[rbfu]{0,2}\"\"\"[\\s\\S]*?(?:\"\"\"|$)|[rbfu]{0,2}'''[\\s\\S]*?(?:'''|$)";

const words = (text) => new Set(text.split(" "));

const C_WORDS = words(
  "auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern false float for goto if inline int long namespace new nullptr operator private protected public return short signed sizeof static struct switch template this throw true try typedef typename union unsigned using virtual void volatile while",
);
const JS_WORDS = words(
  "abstract any as async await boolean break case catch class const continue default delete do else enum export extends false finally for from function if implements import in instanceof interface let new null number of private protected public readonly return static string super switch this throw true try type typeof undefined unknown var void while yield",
);
const PYTHON_WORDS = words(
  "False None True and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return self try while with yield",
);
const SHELL_WORDS = words("case do done elif else esac exit export fi for function if in local return set then until while");
const SQL_WORDS = words(
  "and as asc between by case create delete desc distinct drop else end exists from group having in index inner insert into is join left limit not null on or order outer primary right select set table then union unique update values view when where with",
);
const RUST_GO_WORDS = words(
  "as async await break case chan const continue crate default defer dyn else enum extern false fallthrough fn for func go goto if impl import in interface let loop map match mod move mut nil package pub range ref return select self static string struct super switch trait true type unsafe use var where while",
);

const LANGUAGES = {
  python: [[TRIPLE, HASH, QUOTED], PYTHON_WORDS],
  js: [[SLASHES, BACKTICKS, QUOTED], JS_WORDS],
  c: [[SLASHES, QUOTED], C_WORDS],
  rust: [[SLASHES, DOUBLE, BACKTICKS], RUST_GO_WORDS],
  shell: [["(?<![\\w$])#[^\\n]*", QUOTED], SHELL_WORDS],
  sql: [[DASHES, SLASHES, QUOTED], SQL_WORDS],
  json: [[QUOTED], words("true false null")],
  config: [[HASH, QUOTED], words("true false null yes no")],
};
const ALIASES = {
  py: "python", javascript: "js", ts: "js", typescript: "js", jsx: "js", tsx: "js", "c++": "c", cpp: "c", cuda: "c", cu: "c", h: "c",
  java: "c", cs: "c", csharp: "c", kotlin: "c", go: "rust", rs: "rust", bash: "shell", sh: "shell", zsh: "shell", console: "shell",
  yaml: "config", yml: "config", toml: "config", ini: "config", dockerfile: "shell", jsonc: "json",
};

const NUMBER = "(?<![\\w.])(?:0[xX][\\da-fA-F_]+|0[bB][01_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b";
const WORD = "[A-Za-z_]\\w*";

/** Longer code stays plain: nobody reads its colours, and it is made again with every token. */
const MAX_LENGTH = 20_000;

const patterns = new Map();

function patternOf(name) {
  if (!patterns.has(name)) {
    const rules = LANGUAGES[name][0].map((rule) => `(?:${rule})`).join("|");
    patterns.set(name, new RegExp(`(${rules})|(${NUMBER})|(${WORD})`, "g"));
  }
  return patterns.get(name);
}

/** Strings and spans of a code text. */
export function highlight(text, language) {
  const wanted = language.toLowerCase();
  const name = Object.hasOwn(LANGUAGES, wanted) ? wanted : Object.hasOwn(ALIASES, wanted) ? ALIASES[wanted] : null;
  if (name === null || text.length > MAX_LENGTH) return [text];
  const keywords = LANGUAGES[name][1];
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(patternOf(name))) {
    const [whole, quoted, number, word] = found;
    const isKeyword = word !== undefined && keywords.has(name === "sql" ? word.toLowerCase() : word);
    const kind = quoted ? (/^(?:#|\/\/|\/\*|--)/.test(quoted) ? "comment" : "string") : number ? "number" : isKeyword ? "keyword" : null;
    if (kind === null) continue;
    if (found.index > end) parts.push(text.slice(end, found.index));
    parts.push(h("span", { class: `hl-${kind}` }, whole));
    end = found.index + whole.length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}
