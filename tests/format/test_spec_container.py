"""The example and the tables of specs/container.md are executed."""

import re
from pathlib import Path

from ninfer_format.directory import canonical_json, check_objects, parse_directory
from ninfer_format.formats import LAYOUTS, NUMERIC_FORMATS, RESOURCE_ENCODINGS

SPEC = (Path(__file__).parents[2] / "specs" / "container.md").read_text(encoding="utf-8")


def test_example_is_canonical_and_valid() -> None:
    example = re.search(r"```json\n(.*?)\n```", SPEC, re.DOTALL)
    assert example is not None
    directory = parse_directory(example.group(1).encode())
    check_objects(directory.objects, 260)
    assert canonical_json(directory).decode() == example.group(1)


def test_registry_table_lists_exactly_the_registered_names() -> None:
    rows = dict(re.findall(r"^\| (format|layout|encoding) \| (.*?) \|$", SPEC, re.MULTILINE))
    for row, names in (("format", NUMERIC_FORMATS), ("layout", LAYOUTS), ("encoding", RESOURCE_ENCODINGS)):
        assert re.findall(r"`([^`]+)`", rows[row]) == list(names)
