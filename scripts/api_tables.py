"""Write the tables of request fields in the pages of the APIs, from the rows the server reads by.

python -m scripts.api_tables [--check] [PAGE...]

A table stands between ``<!-- fields: NAME -->`` and ``<!-- end -->``; NAME is an API of ``serve/fields.py``, or
something that stands in an array of a request, as ``serve/item_fields.py`` has it.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ninfer_runtime.serve import item_fields
from ninfer_runtime.serve.fields import FIELDS, MAX_TOKENS, Field, Members
from ninfer_runtime.serve.kinds import Array, Boolean, Free, Integer, Kind, Number, OneOf, String, StringMap, Strings

SPECS = Path(__file__).resolve().parents[1] / "specs"
PAGES = tuple(sorted(SPECS.glob("api-*.md")))
TABLE = re.compile(r"(?<=<!-- fields: )([\w -]+?)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
NO_LIMIT = 1 << 20

ROWS: Mapping[str, tuple[Field, ...]] = {
    **{str(api): rows for api, rows in FIELDS.items()},
    **{f"item {name}": rows for name, rows in item_fields.ITEMS.items()},
    **{f"part {name}": rows for name, rows in item_fields.PARTS.items()},
    **{f"block {name}": rows for name, rows in item_fields.BLOCKS.items()},
    "flat tool": item_fields.FLAT_TOOL,
    "tool": item_fields.TOOL,
    "turn": item_fields.TURN,
}


def values_of(kind: Kind) -> str:
    """What a field takes, in a few words."""
    match kind:
        case Boolean():
            return "`true`, `false`"
        case OneOf(words):
            return ", ".join(f"`{word}`" for word in words)
        case Integer(low, high):
            return f"integer ≥ {low}" if high >= MAX_TOKENS else f"integer {low} to {high}"
        case Number(low, high):
            return f"number {low:g} to {high:g}"
        case String(least, _):
            return "text, not empty" if least else "text"
        case Strings(most, single):
            return f"{'text, or ' if single else ''}up to {most} texts"
        case Array(least, most):
            return "array" + (f", at least {least}" if least else "") + (f", up to {most}" if most < NO_LIMIT else "")
        case StringMap(most, key_chars, value_chars):
            return f"up to {most} pairs of a name ({key_chars} characters) and a text ({value_chars})"
        case Members():
            return "object"
        case Free(describes):
            kinds = [str(one["type"]) for one in describes.get("anyOf", [describes]) if "type" in one]
            return " or ".join("text" if name == "string" else name for name in kinds) or "see below"
    return "see below"


def lines_of(rows: tuple[Field, ...], place: str = "") -> list[str]:
    """The table's lines: offered fields in their order, members behind their object, refused fields last."""
    lines = []
    for row in rows:
        name = f"{place}{row.name}"
        if row.why is not None:
            continue
        needed = ", required" if row.required else ""
        lines.append(f"| `{name}` | {values_of(row.kind)}{needed} | {row.about} |")
        if isinstance(row.kind, Members):
            lines += lines_of(row.kind.rows, f"{name}.")
    for row in rows:
        if row.why is not None:
            only = ", ".join(f"`{_shown(value)}`" for value in row.only) or "–"
            lines.append(f"| `{place}{row.name}` | {only} | refused ({row.code}): {row.why} |")
    return lines


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def table(name: str) -> str:
    """One whole table."""
    head = ["| field | values | what it does |", "|---|---|---|"]
    return "\n".join([*head, *lines_of(ROWS[name])]) + "\n"


def written(text: str) -> str:
    """A page with its tables as they should be; KeyError for a name without rows."""
    return TABLE.sub(lambda found: f"{found[1]}{found[2]}{table(found[1])}", text)


def main() -> int:
    """0 when nothing had to change, or after writing."""
    parser = argparse.ArgumentParser(description="Write the tables of request fields in the pages of the APIs.")
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")
    options = parser.parse_args()
    n_stale = 0
    for page in options.pages:
        before = page.read_text(encoding="utf-8")
        after = written(before)
        if after != before:
            n_stale += 1
            print(page)
            if not options.check:
                page.write_text(after, encoding="utf-8")
    return 1 if options.check and n_stale else 0


if __name__ == "__main__":
    sys.exit(main())
