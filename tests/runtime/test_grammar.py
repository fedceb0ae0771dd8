"""Prescribed forms: whatever the model would say, what comes out is accepted by a checker that knows no grammars."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ninfer_format.errors import GenerationError, MissingExtraError, RequestError
from ninfer_runtime.text import grammar as grammar_module
from ninfer_runtime.text import grammar_matcher
from ninfer_runtime.text.grammar import Choice, GrammarSpec, JsonObject, JsonSchema, Lark, Regex, grammar_for
from ninfer_runtime.text.tokenizer import Tokenizer
from tests.runtime.following import accepts, allowed, row_of, write

ROOT = Path(__file__).resolve().parents[2]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 2},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"city": {"type": ["string", "null"], "maxLength": 5}}}},
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "list of unions": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "number"}]}, "maxItems": 4},
    "constant": {"const": {"a": [1, None]}},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$"},
}
PATTERNS = ("[a-z ]{3,20}x?[0-9]+", r"(yes|no)(, (yes|no)){0,3}\.", "[ä-ü😀]{1,3}", "a*")
CHOICES = ("positive", "pos", 'a "quoted" \\ line\n', "😀", "<think>", "")
SUMS = 'start: sum\nsum: "(" sum "+" sum ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = ROOT / "examples" / "tiny" / "dense"
    names = ("tokenizer.json", "tokenizer_config.json")
    return Tokenizer.from_files(*((folder / name).read_bytes() for name in names))


@pytest.fixture(scope="module")
def stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(tokenizer.added[text].token_id for text in ("<|im_end|>", "<|endoftext|>"))


def short(before: bytes, piece: bytes) -> float:
    """Ends strings, lists and numbers early enough."""
    return 40.0 if piece == b'"' else 0.05 if piece.isspace() else 1.0


# ---- what is written is of the form --------------------------------------------------------------
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_document_is_of_its_schema(name: str, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    schema = SCHEMAS[name]
    texts = [write(JsonSchema(schema), tokenizer, stop_ids, seed, lean=short) for seed in range(40)]
    ended = [written for written in texts if written.ended]
    assert len(ended) > 30
    for written in ended:
        jsonschema.validate(json.loads(written.text), schema)
    if name != "constant":
        assert len({written.text for written in ended}) > 20


def test_a_json_object_is_an_object(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    texts = [write(JsonObject(), tokenizer, stop_ids, seed, lean=short) for seed in range(40)]
    ended = [json.loads(written.text) for written in texts if written.ended]
    assert len(ended) > 20
    assert all(isinstance(document, dict) for document in ended)
    assert any(ended)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_text_matches_the_whole_pattern(pattern: str, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    texts = [write(Regex(pattern), tokenizer, stop_ids, seed) for seed in range(40)]
    assert all(re.fullmatch(pattern, written.text) for written in texts if written.ended)
    assert sum(written.ended for written in texts) > 30


def test_every_text_is_one_of_the_choices(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    texts = [write(Choice(CHOICES), tokenizer, stop_ids, seed) for seed in range(80)]
    assert all(written.ended for written in texts)
    assert {written.text for written in texts} == set(CHOICES)


def test_every_text_is_a_sentence_of_the_lark_grammar(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    texts = [write(Lark(SUMS), tokenizer, stop_ids, seed, n_max=80) for seed in range(40)]
    ended = [written.text for written in texts if written.ended]
    assert len(ended) > 10
    assert any("+" in text for text in ended)
    for text in ended:
        while "(" in text:
            text, found = re.subn(r"\([0-9]{1,3}\+[0-9]{1,3}\)", "1", text)
            assert found, text
        assert re.fullmatch("[0-9]{1,3}", text)


def test_a_text_cut_by_the_length_limit_can_still_be_completed(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    for seed in range(10):
        whole = write(JsonSchema(PERSON), tokenizer, stop_ids, seed, lean=short)
        cut = write(JsonSchema(PERSON), tokenizer, stop_ids, seed, n_max=7, lean=short)
        assert not cut.ended
        assert whole.text.startswith(cut.text)


@pytest.mark.slow
def test_two_thousand_documents_are_of_their_schemas(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    n_ended = 0
    for seed in range(2000):
        schema = list(SCHEMAS.values())[seed % len(SCHEMAS)]
        written = write(JsonSchema(schema), tokenizer, stop_ids, seed, lean=short)
        if written.ended:
            jsonschema.validate(json.loads(written.text), schema)
            n_ended += 1
    assert n_ended > 1800


# ---- masks ---------------------------------------------------------------------------------------
SPECS: dict[str, GrammarSpec] = {
    "schema": JsonSchema(PERSON),
    "object": JsonObject(),
    "regex": Regex(PATTERNS[0]),
    "choice": Choice(CHOICES),
    "lark": Lark(SUMS),
}


@pytest.mark.parametrize("starts_inside", [False, True], ids=["answer", "thinking"])
@pytest.mark.parametrize("name", SPECS)
def test_masks_for_drafts_are_those_after_stepping(
    name: str, starts_inside: bool, tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> None:
    thought = tokenizer.encode_segments(tokenizer.split("Hm </th.\n</think>\n\n")) if starts_inside else []
    for seed in range(4):
        answer = write(SPECS[name], tokenizer, stop_ids, seed, n_max=40, lean=short)
        token_ids = [*thought, *answer.token_ids]
        if answer.ended:
            token_ids += [min(stop_ids)] * 2
        stepping, drafting = (
            grammar_for(SPECS[name], tokenizer, stop_ids, starts_inside=starts_inside) for _ in range(2)
        )
        for at in range(len(token_ids)):
            drafts = token_ids[at : at + 5]
            n_rows, ahead = row_of(drafting, tokenizer, drafts)
            again, same = row_of(drafting, tokenizer, drafts)
            assert (n_rows, ahead.tolist()) == (again, same.tolist()), "asking changed the state"
            assert n_rows == 1 + len(drafts)
            reference = grammar_for(SPECS[name], tokenizer, stop_ids, starts_inside=starts_inside)
            for token_id in token_ids[:at]:
                reference.advance(token_id)
            for n in range(1 + len(drafts)):
                assert allowed(ahead[n]) == allowed(row_of(reference, tokenizer)[1][0])
                if n < len(drafts):
                    reference.advance(drafts[n])
            assert allowed(ahead[0]) == allowed(row_of(stepping, tokenizer)[1][0])
            stepping.advance(token_ids[at])
            drafting.advance(token_ids[at])


def test_rows_end_at_the_first_draft_that_is_not_allowed(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    grammar = grammar_for(Regex("aa*b"), tokenizer, stop_ids)
    a, b, c = (tokenizer.encode_text(letter)[0] for letter in "abc")
    for drafts, n_rows in {(c, a): 1, (a, c, a): 2, (a, a, b): 4, (a, min(stop_ids)): 2}.items():
        assert row_of(grammar, tokenizer, drafts)[0] == n_rows
    n_rows, out = row_of(grammar, tokenizer, (a, b, min(stop_ids), max(stop_ids), a))
    assert n_rows == 5
    assert set(allowed(out[2])) == set(allowed(out[3])) == set(allowed(out[4])) == stop_ids


def test_stop_ids_are_allowed_exactly_where_the_text_may_end(tokenizer: Tokenizer) -> None:
    ordinary = tokenizer.encode_text("b")[0]
    stops = frozenset({ordinary, tokenizer.added["<|im_end|>"].token_id})
    grammar = grammar_for(Regex("(a[bc])+"), tokenizer, stops)
    a, c = (tokenizer.encode_text(letter)[0] for letter in "ac")
    assert not stops & set(allowed(row_of(grammar, tokenizer)[1][0]))
    grammar.advance(a)
    assert not stops & set(allowed(row_of(grammar, tokenizer)[1][0])), "it could go on, but would be the end"
    grammar.advance(c)
    assert stops < set(allowed(row_of(grammar, tokenizer)[1][0]))


def test_control_tokens_and_rows_without_an_id_are_never_allowed(
    tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> None:
    control = {token.token_id for token in tokenizer.added.values() if token.special} - stop_ids
    for starts_inside in (False, True):
        grammar = grammar_for(Regex("(?s:.*)"), tokenizer, stop_ids, starts_inside=starts_inside)
        ids = set(allowed(row_of(grammar, tokenizer)[1][0]))
        assert max(ids) < tokenizer.n_addressable
        assert bool(ids & control) is starts_inside, "a thought may be anything, an answer is text"
    for token in tokenizer.added.values():
        assert not accepts(Choice((token.text,)), tokenizer, stop_ids, [token.token_id])
        assert accepts(Choice((token.text,)), tokenizer, stop_ids, tokenizer.encode_text(token.text))


def test_one_grammar_does_not_see_what_another_of_the_same_form_reads(
    tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> None:
    one, two = (grammar_for(Choice(("ab", "ac")), tokenizer, stop_ids) for _ in range(2))
    before = allowed(row_of(two, tokenizer)[1][0])
    one.advance(tokenizer.encode_text("a")[0])
    assert allowed(row_of(one, tokenizer)[1][0]) != before
    assert allowed(row_of(two, tokenizer)[1][0]) == before


def test_a_token_that_breaks_the_form_is_an_error(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    grammar = grammar_for(Regex("ab"), tokenizer, stop_ids)
    with pytest.raises(GenerationError, match="breaks the form"):
        grammar.advance(tokenizer.encode_text("b")[0])


# ---- thinking ------------------------------------------------------------------------------------
def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_segments(tokenizer.split(text))


@pytest.mark.parametrize("spelled", [False, True], ids=["token", "letters"])
@pytest.mark.parametrize("frame", ["", "\n", "\n\n"])
def test_the_form_begins_behind_the_thinking(
    frame: str, spelled: bool, tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> None:
    grammar = grammar_for(Regex("[0-9]+"), tokenizer, stop_ids, starts_inside=True)
    everything = set(range(tokenizer.n_addressable))
    thought = encode(tokenizer, "Is it < 3? </thin\n")
    close = tokenizer.encode_text("</think>") if spelled else [tokenizer.added["</think>"].token_id]
    for token_id in thought:
        assert everything - stop_ids - set(allowed(row_of(grammar, tokenizer)[1][0])) <= set(
            ids_with(tokenizer, b">", b"think>")
        )
        grammar.advance(token_id)
    for token_id in [*close, *tokenizer.encode_text(frame)]:
        assert token_id in allowed(row_of(grammar, tokenizer)[1][0])
        grammar.advance(token_id)
    answer = {tokenizer.token_bytes(token_id) for token_id in allowed(row_of(grammar, tokenizer)[1][0])}
    expected = {b"\n" * n for n in range(1, 3 - len(frame))} & {tokenizer.token_bytes(i) for i in everything}
    assert answer - expected == {b"%d" % digit for digit in range(10)}
    assert expected <= answer


def ids_with(tokenizer: Tokenizer, *pieces: bytes) -> Sequence[int]:
    return [i for i in range(tokenizer.n_addressable) if any(piece in tokenizer.token_bytes(i) for piece in pieces)]


def test_no_token_ends_the_thinking_and_says_something_else_too(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    grammar = grammar_for(Regex("[0-9]+"), tokenizer, stop_ids, starts_inside=True)
    for token_id in tokenizer.encode_text("x</think"):
        grammar.advance(token_id)
    ids = allowed(row_of(grammar, tokenizer)[1][0])
    closing = {tokenizer.token_bytes(i) for i in ids if tokenizer.token_bytes(i).startswith(b">")}
    every = {tokenizer.token_bytes(i) for i in ids_with(tokenizer, b">") if tokenizer.token_bytes(i)[:1] == b">"}
    assert closing == {piece for piece in every if not piece[1:].strip(b"\n")}
    assert closing < every


# ---- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "spec, words",
    [
        (JsonSchema({"type": "objec"}), "objec"),
        (JsonSchema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (JsonSchema({"$ref": "https://example.com/schema.json"}), "example.com"),
        (JsonSchema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (JsonSchema(False), "false"),
        (JsonSchema({"const": float("nan")}), "no JSON document"),
        (Regex("a("), "unclosed group"),
        (Regex("(?=a)b"), "look-ahead"),
        (Regex("[^\\x00-\\x{10FFFF}]"), "allows no text"),
        (Choice(()), "choices is empty"),
        (Lark("start: nowhere"), "nowhere"),
        (Lark(""), "Empty grammar"),
        (Lark("start: " + "(" * 30000 + '"a"' + ")" * 30000), "too deeply nested"),
        (Lark("x" * 300_000), "expected at most"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_in_the_compilers_words(
    spec: GrammarSpec, words: str, tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        grammar_for(spec, tokenizer, stop_ids)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


def test_a_schema_of_bottomless_nesting_is_refused(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested too deeply"):
        grammar_for(JsonSchema(schema), tokenizer, stop_ids)


def chain_of_references(n: int) -> dict[str, Any]:
    """A schema whose every definition holds a reference to the next."""
    links = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{n}": {"type": "null"}}}


@pytest.mark.parametrize(
    "spec",
    [
        JsonSchema(chain_of_references(2500)),
        Lark("start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(15_000)) + 'a15000: "x"'),
    ],
    ids=["schema", "lark"],
)
def test_long_chains_of_rules_do_not_overrun_the_stack(
    spec: GrammarSpec, tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> None:
    grammar = grammar_for(spec, tokenizer, stop_ids)
    assert allowed(row_of(grammar, tokenizer)[1][0])


def test_a_form_needs_an_end(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="stop id"):
        grammar_for(JsonObject(), tokenizer, frozenset())


def test_compiling_takes_its_time_and_no_more(
    tokenizer: Tokenizer, stop_ids: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_matcher, "COMPILE_SECONDS", 0.0)
    with pytest.raises(RequestError, match="not compiled in 0 seconds"):
        grammar_for(JsonSchema(chain_of_references(2000)), tokenizer, stop_ids)


def test_a_form_is_compiled_once(
    tokenizer: Tokenizer, stop_ids: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_ = grammar_matcher.GrammarVocabulary.compile

    def counting(self: grammar_matcher.GrammarVocabulary, source: str) -> Any:
        compiled.append(source)
        return compile_(self, source)

    monkeypatch.setattr(grammar_matcher.GrammarVocabulary, "compile", counting)
    monkeypatch.setattr(grammar_module, "MAX_KEPT", 2)
    for letters in ("wx", "wx", "wy", "wx", "wz", "wx", "wy"):
        grammar_for(Choice(tuple(letters)), tokenizer, stop_ids)
    assert [re.findall("[xyz]", source)[-1] for source in compiled] == ["x", "y", "z", "y"]


def test_without_the_library_there_is_one_line(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ninfer\[grammar\]'"):
        grammar_matcher.GrammarVocabulary(tokenizer)


def test_importing_forms_does_not_import_the_compiler() -> None:
    program = "import sys, ninfer_runtime.text.grammar; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
