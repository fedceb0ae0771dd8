"""Cases that went wrong in software like this have tests that name their ids, as ``test_d6_d8_…`` does."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
IDS = {
    "a": (1, 3, 4, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 20, 22, 23, 25, 26, 27, 28, 31, 32, 33, 34, 35),
    "c": (1, 3, 4, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16, 17, 19, 20, 21, 22, 23, 25, 26, 27, 28, 29, 30),
    "d": (1, 2, 3, 4, 5, 6, 8, 9, 11, 12, 13, 15, 16, 17, 19, 20, 21, 22, 23),
    "e": (1, 2, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14),
    "f": (1, 2, 3, 4, 6, 7, 9),
}
"""a: converter input; c: requests, streams, a server's life; d: templates, tools, thinking; e: sampling; f: reuse."""
CASES = [f"{letter}{number}" for letter, numbers in IDS.items() for number in numbers]


@cache
def named() -> frozenset[str]:
    """The ids in names of tests, and in docstrings that say "case" in front of them."""
    text = "\n".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py"))
    in_names = (part for name in re.findall(r"def (test_\w+)", text) for part in name.split("_"))
    in_words = (part for words in re.findall(r"[Cc]ases? ([A-G]\d[\w, ]*)", text) for part in re.findall(r"\w+", words))
    return frozenset(part.lower() for part in (*in_names, *in_words) if re.fullmatch(r"[A-Ga-g]\d+", part))


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_a_test(case: str) -> None:
    assert case in named()
