"""What goes wrong with prefix caches, case by case: who is kept, who goes, what must not be taken for the same."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from ninfer_runtime.cache.pages import pages_for
from ninfer_runtime.cache.prefix import MIN_SAVED, NoCache, PrefixCache
from ninfer_runtime.cache.tree import TokenTree
from ninfer_runtime.engine.sequence import Anchors, MissReason, Reuse
from ninfer_runtime.text.anchors import template_key
from ninfer_runtime.text.frontend import Frontend, Prompt
from ninfer_runtime.text.messages import Conversation, Message
from ninfer_runtime.text.template import TemplateOptions
from scripts.prefix_trace import SOURCE, frontend_of
from tests.runtime.history import Lanes, as_program, int32s, lanes

SYSTEM_TOKENS = 300
REUSED_AT_LEAST = 0.9
"""Of the prompt tokens of a second pass over system prompts that all have a place (specs/prefix-reuse.md)."""


def system(i: int, n_tokens: int = SYSTEM_TOKENS) -> list[int]:
    """The system block of a synthetic application."""
    return [1000 * (i + 1) + j for j in range(n_tokens)]


def ask(on: Lanes, i: int, question: int, n_tokens: int = SYSTEM_TOKENS, n_answer: int = 40) -> Reuse:
    """A question of 20 tokens to application ``i``; with an answer, its end takes a place as well."""
    prompt = [*system(i, n_tokens), *range(10_000_000 + 100 * question, 10_000_020 + 100 * question)]
    return on.serve(prompt, [7] * n_answer, at=(n_tokens,))


# F2, a catalogue that is full


@pytest.mark.parametrize("device, host", [(4, 0), (0, 4), (2, 2)])
def test_f2_the_second_use_of_a_new_prompt_hits_however_many_came_before(device: int, host: int) -> None:
    on = lanes(n_pages=64, device=device, host=host)
    for i in range(3 * 4):
        ask(on, i, 2 * i)
        assert ask(on, i, 2 * i + 1).n_tokens == SYSTEM_TOKENS
    for repeat in range(3):
        for i in range(3 * 4):
            ask(on, i, 100 * (repeat + 1) + i)
    ask(on, 50, 1000)
    ask(on, 51, 1001)
    assert ask(on, 50, 1002).n_tokens == SYSTEM_TOKENS
    assert ask(on, 51, 1003).n_tokens == SYSTEM_TOKENS


def test_f2_large_prompts_that_nobody_asks_for_again_make_room_for_small_ones() -> None:
    on = lanes(n_pages=200, device=4, context=2048)
    for i in range(4):
        ask(on, i, i, n_tokens=1500)
    for i in range(10, 40):  # Each as small as is kept at all.
        ask(on, i, i, n_tokens=2 * MIN_SAVED)
        assert ask(on, i, i + 100, n_tokens=2 * MIN_SAVED).n_tokens == 2 * MIN_SAVED
    hits = [ask(on, 80 + i % 3, 200 + i, 5 * MIN_SAVED, 0).n_tokens for i in range(40)]
    assert all(hits[20:]), "three prompts in turn have a place each, once what is large has aged"


# F3, mass eviction while there is room


@pytest.mark.parametrize("n_tokens, n_places", [(300, 2 * 39), (1200, 39 + 5)])
def test_f3_thirty_nine_system_prompts_are_all_reused_while_the_host_has_room(n_tokens: int, n_places: int) -> None:
    """A place for each end of an answer as well, or a few of those that large system prompts do not give way to."""
    n_pages = 39 * pages_for(n_tokens) + 2 * (n_places - 39) + 8
    on = lanes(n_pages=n_pages, device=4, host=n_places - 4)
    for i in range(39):
        ask(on, i, i, n_tokens)
    found = [ask(on, i, 100 + i, n_tokens) for i in range(39)]
    reused = sum(reuse.n_tokens for reuse in found) / (39 * (n_tokens + 20))
    assert reused >= REUSED_AT_LEAST
    assert on.fake.n_moved > 0


# F4, what identifies a prompt


def test_f4_the_same_tokens_with_other_media_share_nothing() -> None:
    on, prompt = lanes(), list(range(200))
    first, second = (sha256(picture).digest() for picture in (b"a cat", b"a dog"))
    on.serve(prompt, [1] * 40, at=(100,), key=first)
    assert on.serve(prompt, [1] * 40, at=(100,), key=second) == Reuse(0, 0, MissReason.EMPTY)
    assert on.serve(prompt, [1] * 40, at=(100,), key=first).n_tokens == 100


def test_f4_more_identities_than_sixteen_bits_tell_apart_are_told_apart() -> None:
    tree: TokenTree[int] = TokenTree()
    text = np.arange(5, dtype=np.int32)
    for i in range(65_537):
        tree.place(i.to_bytes(32, "little"), text, i)
    for i in (0, 1, 65_535, 65_536):
        assert tree.match(i.to_bytes(32, "little"), text).values == (i,)
    assert tree.match((65_537).to_bytes(32, "little"), text).values == ()


def test_f4_texts_of_many_ids_are_compared_at_every_position() -> None:
    on, prompt = lanes(), list(range(150))
    on.serve(prompt, at=(149,))
    for position in range(149):
        changed = [*prompt[:position], prompt[position] ^ 0x10000, *prompt[position + 1 :]]
        assert on.serve([*changed, 5]).n_tokens == 0


# F7, what else belongs to the key


def prompt_of(frontend: Frontend, tools: Sequence[str] = ("now",), **options: Any) -> Prompt:
    asked = Message("user", "Which day comes after Monday, and which one comes after that one? " * 3)
    offered = tuple({"type": "function", "function": {"name": name, "description": name * 20}} for name in tools)
    return frontend.prompt(Conversation((asked,), offered), **options)


@pytest.mark.parametrize(
    "changed",
    [
        {"thinking": False},
        {"preserve_thinking": True},
        {"preserve_thinking": False},
        {"tools": ("later",)},
        {"tools": ("now", "later")},
        {"tools": ()},
    ],
    ids=str,
)
def test_f7_any_other_choice_for_the_template_or_tools_is_a_miss(changed: dict[str, Any]) -> None:
    frontend, on = frontend_of(SOURCE), lanes()
    first = prompt_of(frontend)
    on.serve(first.token_ids, at=first.anchors.at, key=first.anchors.key)
    other = prompt_of(frontend, **changed)
    reuse = on.serve(other.token_ids, at=other.anchors.at, key=other.anchors.key)
    assert reuse.n_tokens == 0
    assert reuse.reason is (MissReason.DIFFERS if "tools" in changed else MissReason.EMPTY)
    again = on.serve(first.token_ids, at=first.anchors.at, key=first.anchors.key)
    assert again.n_tokens == first.anchors.at[-1]


def test_f7_every_template_option_is_part_of_the_key() -> None:
    options = [
        TemplateOptions(thinking, preserve, effort)
        for thinking in (None, True, False)
        for preserve in (None, True, False)
        for effort in (None, "low", "high")
    ]
    assert len({template_key(chosen) for chosen in options}) == len(options) == 27


def test_f7_a_cache_belongs_to_one_program_and_its_storage_of_keys_and_values() -> None:
    first, second = lanes(), lanes()
    first.serve(list(range(100)), at=(90,))
    assert second.serve(list(range(100))) == Reuse(0, 0, MissReason.EMPTY)
    second.cache.clear()
    assert first.serve(list(range(100))).n_tokens == 90


# pages and places


def test_small_requests_do_not_push_out_the_conversation_that_is_worth_more() -> None:
    on = lanes(n_pages=128, device=4)
    ask(on, 0, 0, n_tokens=1500)
    for i in range(1, 8):
        on.serve(system(i, 80), [5] * 3)
    assert ask(on, 0, 1, n_tokens=1500).n_tokens == 1500


def test_admission_comes_before_everything_that_is_kept() -> None:
    """A prompt that needs the whole pool gets it, and the report says what was lost."""
    on = lanes(n_pages=10, device=8, context=640)
    on.serve(system(0, 320), at=(300,))
    assert on.cache.could_fit(10)
    assert on.serve(system(1, 640)).n_tokens == 0
    assert on.serve(system(0, 320)) == Reuse(0, 300, MissReason.EVICTED)


def test_page_of_a_kept_text_is_taken_over_when_there_is_no_room_for_a_copy() -> None:
    on = lanes(n_pages=5, device=2, context=320)
    on.serve(system(0, 100), at=(90,))
    prompt = [*system(0, 90), *range(230)]
    assert on.serve(prompt).n_tokens == 90
    assert on.serve(system(0, 100)) == Reuse(0, 90, MissReason.EVICTED, 90)


def test_without_reuse_nothing_is_kept_and_nothing_reported() -> None:
    on = lanes()
    plain = Lanes(on.fake, NoCache(as_program(on.fake), on.pool), on.pool)
    for _ in range(2):
        assert plain.serve(range(100), [1] * 40, at=(50,)) == Reuse()
    assert on.pool.n_free == on.pool.n_pages
    begun = plain.cache.begin(0, Anchors(), int32s([1]), on.pool.n_pages + 1)
    assert begun is None


# who goes first


def lengths(on: Lanes) -> set[int]:
    """Tokens of the kept texts."""
    assert isinstance(on.cache, PrefixCache)
    return {kept.n_tokens for kept in on.cache._retained.all()}


def aged(device: int) -> Lanes:
    """A cache that has kept and given up many a small text."""
    on = lanes(n_pages=128, device=device)
    for i in range(60):
        on.serve(system(i, 100))
    return on


def test_conversation_as_it_was_before_it_was_rewritten_goes_first() -> None:
    on = aged(device=4)
    question = [*system(100, 200), *range(60)]
    on.serve(question, [5] * 600, at=(200, 260))
    assert lengths(on) >= {200, 260, 859}
    rewritten = [*question, *range(500, 550), *range(700, 760)]
    assert on.serve(rewritten, at=(200, 310)).n_tokens == 260
    assert lengths(on) == {200, 310, 370, 100}, "600 tokens that nobody comes back to make room, not 100 of others"
    assert on.serve([*rewritten, 1], at=(200, 310)).n_tokens == 370


def test_other_conversations_of_the_same_application_are_left_alone() -> None:
    """Another first question is no rewriting: what goes on behind the system block only has its level and its worth."""
    on = aged(device=4)
    on.serve([*system(100, 200), *range(60)], [5] * 600, at=(200,))
    on.serve([*system(100, 200), *range(1000, 1060)], at=(200,))
    on.serve(system(101, 100))
    assert 859 in lengths(on)


def test_end_that_its_conversation_has_passed_goes_before_a_smaller_one_in_use() -> None:
    on = aged(device=3)
    text = [*range(300)]
    on.serve(text)
    assert lengths(on) == {300, 100}
    on.serve([*text, *range(1000, 1200)])
    assert lengths(on) == {500, 100}


def test_ends_make_room_for_pages_before_what_others_begin_with() -> None:
    on = lanes(n_pages=12, device=8, context=768)
    on.serve([*system(0, 128), *range(250)], [5] * 50, at=(128,))
    on.serve(system(1, 440))
    assert lengths(on) == {128, 440}
    assert ask(on, 0, 7, n_tokens=128).n_tokens == 128


def test_what_others_begin_with_stays_even_where_it_would_free_a_page_for_less() -> None:
    on = lanes(n_pages=12, device=8, context=768)
    ask(on, 0, 0, n_tokens=130, n_answer=0)
    on.serve([*system(0, 130), *range(250)], at=(130,))
    assert lengths(on) == {130, 380}
    on.serve(system(1, 440))
    assert lengths(on) == {130, 440}


def test_text_whose_pages_a_running_sequence_holds_is_not_given_up_for_pages() -> None:
    on = lanes(n_pages=12, device=8, context=768)
    on.serve(system(0, 300))
    running = on.begin(1, Anchors(at=(150,)), system(1, 200), 0)
    assert running is not None
    while on.prefill(running):
        pass
    assert on.begin(0, Anchors(), system(2, 448), 0) is not None
    assert lengths(on) == {150}


def test_text_that_is_used_stays_whatever_else_comes() -> None:
    on = lanes(n_pages=128, device=4)
    ask(on, 100, 0, n_tokens=100, n_answer=0)
    for i in range(40):
        on.serve(system(i, 90))
        on.serve(system(50 + i, 90))
        assert ask(on, 100, 1 + i, n_tokens=100, n_answer=0).n_tokens == 100


@pytest.mark.parametrize("device, host", [(3, 0), (0, 3)])
def test_among_equals_the_least_recently_used_goes_first(device: int, host: int) -> None:
    on = lanes(device=device, host=host)
    for i in (0, 1, 2, 0, 3):
        ask(on, i, 0, n_answer=0)
    assert ask(on, 0, 1, n_answer=0).n_tokens == SYSTEM_TOKENS
    assert ask(on, 2, 1, n_answer=0).n_tokens == SYSTEM_TOKENS
    assert ask(on, 1, 1, n_answer=0) == Reuse(0, SYSTEM_TOKENS, MissReason.EVICTED)


@pytest.mark.parametrize("n_tokens", [64, 65, 100, 128])
def test_last_token_of_a_prompt_is_computed_even_where_its_own_state_is_kept(n_tokens: int) -> None:
    on, prompt = lanes(), list(range(n_tokens))
    on.serve(prompt, at=(32, n_tokens))
    assert on.serve(prompt, at=(32, n_tokens)).n_tokens == 32
    assert on.serve([*prompt, 1]) == Reuse(n_tokens, n_tokens, MissReason.NONE)
