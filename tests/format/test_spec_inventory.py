"""The examples of specs/inventory.md are run, and its role table is the table the code has."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from ninfer_format.roles import ROLES

PAGE = Path(__file__).parents[2] / "specs" / "inventory.md"
NAMINGS = {"": ("split", "fused", "moe"), "split": ("split",), "moe": ("moe",)}
NAMINGS |= {"split, fused": ("split", "fused"), "fused, moe": ("fused", "moe")}


def test_examples_print_what_they_say() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.failed == 0
    assert result.attempted > 0


def test_role_table_lists_the_decoder_roles_in_order_with_their_namings_and_formats() -> None:
    rows = re.findall(
        r"^\| (`[^|]+) \| \[[^|]+\| (matrix|matrix, NVFP4|BF16|FP32|I32) \| ([^|]*?) ?\|$", PAGE.read_text(), re.M
    )
    listed = []
    for names, stored, naming in rows:
        first, *others = re.findall(r"`([^`]+)`", names)
        for name in (first, *(first.rpartition("/")[0] + "/" + other for other in others)):
            listed.append(name)
            role = ROLES["text/" + name]
            assert role.styles == NAMINGS[naming], name
            assert role.is_matrix == stored.startswith("matrix"), name
            assert ("NVFP4" in role.formats) == stored.endswith("NVFP4"), name
            assert role.is_matrix or role.formats == (stored,), name
    expected = [name for name, role in ROLES.items() if name.startswith("text/") and role.divisor_of is None]
    assert ["text/" + name for name in listed] == expected
