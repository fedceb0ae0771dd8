"""What a prescribed form costs on the host: compiling it, and one mask, over a vocabulary of the published size.

    python scripts/time_masks.py [--ids 248077] [--texts 40] [--drafts 3] [--json]

The vocabulary is made of pieces of words found in the standard library's sources, 248,077 ids unless told otherwise.
Texts of every form are drawn at random among the allowed ids; a mask is timed in front of each token, alone and
together with those of the drafts behind it. Times are those of this thread on a core, compiling is wall time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ninfer_runtime.bench.frontend import ADDED_TOKENS, LETTERS, frontend_resources
from ninfer_runtime.text.grammar import Choice, GrammarSpec, JsonObject, JsonSchema, Regex, ToolCalls, grammar_for
from ninfer_runtime.text.tokenizer import Tokenizer, byte_alphabet
from ninfer_runtime.text.tool_calls import Tool

PUBLISHED_IDS = 248_077
MAX_TOKENS = 60
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "role": {"enum": ["admin", "editor", "reader"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
FORMS: dict[str, GrammarSpec] = {
    "JSON schema": JsonSchema(PERSON),
    "JSON object": JsonObject(),
    "regex": Regex(r"[A-Z][a-z ,]{20,200}\."),
    "choice": Choice(("positive", "negative", "neutral")),
    "required call": ToolCalls(tuple(Tool(f"tool_{i}", PERSON) for i in range(20))),
    "free text, then calls": ToolCalls(tuple(Tool(f"tool_{i}", PERSON) for i in range(20)), required=False),
}


def pieces(n: int) -> list[bytes]:
    """``n`` byte strings of two letters and more: parts of words, the most frequent first."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if len(counts) > n:
            break
        for word in re.findall(r" ?[^\W\d_]+| ?[^\w\s]+|\s{2,}", path.read_text(encoding="utf-8", errors="ignore")):
            for end in range(2, min(len(word), 14) + 1):
                counts[word[:end]] += 1
                counts[word[-end:]] += 1
    found = list(dict.fromkeys(text.encode() for text, _ in counts.most_common()))
    return found[:n]


def tokenizer_of(n_ids: int) -> Tokenizer:
    """A vocabulary of so many ids that stand for text."""
    files = frontend_resources(n_ids)
    document = json.loads(files["frontend/tokenizer.json"])
    alphabet = {byte: chr(code) for code, byte in byte_alphabet().items()}
    spelled = ["".join(alphabet[byte] for byte in piece) for piece in pieces(n_ids - LETTERS - len(ADDED_TOKENS))]
    vocabulary = document["model"]["vocab"]
    for name in [name for name, token_id in vocabulary.items() if token_id >= LETTERS][: len(spelled)]:
        del vocabulary[name]
    vocabulary |= {text: LETTERS + i for i, text in enumerate(spelled)}
    return Tokenizer.from_files(json.dumps(document).encode(), files["frontend/tokenizer_config.json"])


def timed(spec: GrammarSpec, tokenizer: Tokenizer, stop_ids: frozenset[int], seed: int, n_drafts: int) -> Iterator[Any]:
    """(µs of one mask, µs of all that a round with drafts needs) in front of every token of one text."""
    rng, words = random.Random(seed), -(-tokenizer.n_addressable // 32)
    token_ids: list[int] = []
    writing, one = grammar_for(spec, tokenizer, stop_ids), np.zeros((1, words), np.uint32)
    while len(token_ids) < MAX_TOKENS:
        writing.masks((), one)
        ids = np.flatnonzero(np.unpackbits(one.view(np.uint8), bitorder="little"))
        ordinary = ids[~np.isin(ids, list(stop_ids))]
        if not len(ordinary) or (len(ordinary) < len(ids) and rng.random() < 0.2):
            break
        token_ids.append(int(ordinary[rng.randrange(len(ordinary))]))
        writing.advance(token_ids[-1])
    grammar, out = grammar_for(spec, tokenizer, stop_ids), np.zeros((1 + n_drafts, words), np.uint32)
    for at, token_id in enumerate(token_ids):
        start = time.thread_time()
        grammar.masks((), one)
        middle = time.thread_time()
        grammar.masks(token_ids[at : at + n_drafts], out)
        yield (middle - start) * 1e6, (time.thread_time() - middle) * 1e6
        grammar.advance(token_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ids", type=int, default=PUBLISHED_IDS)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tokenizer = tokenizer_of(options.ids)
    stop_ids = frozenset({tokenizer.added["<|im_end|>"].token_id, tokenizer.added["<|endoftext|>"].token_id})
    start = time.perf_counter()
    grammar_for(Choice(("a",)), tokenizer, stop_ids)
    rows: dict[str, dict[str, float]] = {"vocabulary": {"compile_ms": (time.perf_counter() - start) * 1e3}}
    for name, spec in FORMS.items():
        start = time.perf_counter()
        grammar_for(spec, tokenizer, stop_ids)
        compile_ms = (time.perf_counter() - start) * 1e3
        times = np.array(
            [t for seed in range(options.texts) for t in timed(spec, tokenizer, stop_ids, seed, options.drafts)]
        )
        one, several = times.T
        rows[name] = {
            "compile_ms": compile_ms,
            "n_masks": len(times),
            "mask_median_us": float(np.median(one)),
            "mask_p99_us": float(np.percentile(one, 99)),
            "mask_max_us": float(one.max()),
            "round_median_us": float(np.median(several)),
            "round_p99_us": float(np.percentile(several, 99)),
        }
    if options.json:
        print(json.dumps({"schema": "ninfer.masks/1", "ids": tokenizer.n_addressable, "forms": rows}, indent=2))
        return
    print(f"{tokenizer.n_addressable} ids, {options.drafts} drafts a round")
    for name, row in rows.items():
        print(f"{name:22} " + "  ".join(f"{key} {value:.1f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
