"""Files that lie, are cut or have flipped bits: the container rows of the list of things that go wrong (B1 to B15)."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ninfer_format import Artifact, verify
from ninfer_format.digests import build_index, index_path, write_index
from ninfer_format.errors import NinferError
from ninfer_format.prefix import prefix_bytes
from tests.format.samples import GOLDEN, Ran, flipped, ninfer_verify, region_of

ROOT = Path(__file__).parents[2]

TINY = GOLDEN / "tiny_v2.ninfer"
CONTENT = TINY.read_bytes()
JSON_END = 16 + 1351
SIZE = len(CONTENT)


def build(path: Path, text: bytes, payload_bytes: int = 1 << 16) -> Path:
    """A version-2 file with this directory text and zero payload."""
    header = prefix_bytes(2, len(text)) + text
    path.write_bytes(header + bytes(-len(header) % 4096 + payload_bytes))
    return path


def entry(**changes: Any) -> dict[str, Any]:
    """A sound FP32 tensor of 64 elements, with changes."""
    members = {"name": "t", "kind": "tensor", "shape": [64], "format": "FP32", "layout": "contiguous-le-v1"}
    return {**members, "offset": 0, "bytes": 256, **changes}


def directory(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"identity": {"model_id": "m", "weights_id": "w"}, "objects": list(entries)}).encode()


def refused(path: Path, *words: str) -> Ran:
    """The reader, the verifier and the command refuse the file quickly, in words and without a traceback."""
    started = time.monotonic()
    with pytest.raises(NinferError):
        Artifact.open(path)
    assert not verify(path, "full", strict=True).ok
    ran = ninfer_verify("check", path)
    assert ran.code in (1, 4), ran
    assert ran.out.startswith(f"{path}: FAILED\n")
    assert "Traceback" not in ran.out + ran.err
    missing = [word for word in words if word not in ran.out]
    assert not missing, f"{missing} not in {ran.out}"
    assert time.monotonic() - started < 10
    return ran


def test_sound_neighbour_of_the_lies_is_accepted(tmp_path: Path) -> None:
    path = build(tmp_path / "a", directory(entry(), entry(name="u", offset=256)))
    assert ninfer_verify("check", path).code == 0


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, SIZE + 1, SIZE, SIZE - 15, 0, 1, 8 << 20, (8 << 20) + 1])
def test_b1_header_length_that_cannot_be_is_refused_before_allocation(length: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(CONTENT[:8] + struct.pack("<Q", length) + CONTENT[16:])
    ran = refused(path)
    if length > SIZE:
        assert str(length) in ran.out
        assert str(SIZE - 16) in ran.out


def test_b2_200_mb_directory_is_refused_by_its_length_in_little_time_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "a"
    n_bytes = 200 << 20
    with open(path, "wb") as stream:
        stream.write(prefix_bytes(2, n_bytes) + b'{"identity":')
        stream.truncate(n_bytes + 8192)
    code = """
import sys, time
from ninfer_format import verify
from tests.peak_memory import peak_rss_bytes
started = time.monotonic()
report = verify(sys.argv[1])
print(report.exit_code, time.monotonic() - started, peak_rss_bytes() >> 20)
"""
    ran = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, check=True)
    exit_code, seconds, mebibytes = ran.stdout.split()
    assert exit_code == "1"
    assert float(seconds) < 2
    assert int(mebibytes) < 300
    refused(path, str(n_bytes), str(8 << 20))


def test_b2_directory_at_the_cap_full_of_objects_is_read_in_bounded_time(tmp_path: Path) -> None:
    names = [f"t{i}" for i in range(60_000)]
    entries = [entry(name=name, offset=256 * i) for i, name in enumerate(names)]
    text = directory(*entries)
    assert (7 << 20) < len(text) <= (8 << 20)
    path = tmp_path / "a"
    with open(path, "wb") as stream:
        stream.write(prefix_bytes(2, len(text)) + text)
        stream.truncate(-(-(16 + len(text)) // 4096) * 4096 + 256 * len(names))
    started = time.monotonic()
    assert verify(path, strict=True).ok
    assert time.monotonic() - started < 20


def test_b3_overlapping_spans_are_refused_with_both_names(tmp_path: Path) -> None:
    refused(build(tmp_path / "a", directory(entry(), entry(name="second"))), "'t'", "'second'")
    many = directory(*(entry(name=f"n{i}") for i in range(10_000)))
    ran = refused(build(tmp_path / "b", many), "'n0'", "'n1'", "more")
    assert len(ran.out) < 10_000
    assert len(verify(tmp_path / "b").problems) == 9_999


B4_TO_B9: dict[str, dict[str, Any]] = {
    "b4 offset of 2^40": {"offset": 1 << 40},
    "b4 offset of 2^63 - 256": {"offset": (1 << 63) - 256},
    "b4 offset of 2^64": {"offset": 1 << 64},
    "b4 negative offset": {"offset": -256},
    "b5 end before begin": {"bytes": -256},
    "b5 zero bytes": {"bytes": 0},
    "b5 one byte short": {"bytes": 255},
    "b5 one byte long": {"bytes": 257},
    "b5 other shape": {"shape": [65]},
    "b6 unknown format": {"format": "FP8"},
    "b6 empty format": {"format": ""},
    "b6 unknown layout": {"layout": "contiguous"},
    "b6 layout of another format": {"layout": "row-split-k128-v1"},
    "b6 resource encoding": {"kind": "resource"},
    "b8 rank 17": {"shape": [1] * 16 + [64]},
    "b8 rank 1,000,000": {"shape": [1] * 1_000_000},
    "b8 product over 2^63": {"shape": [1 << 32, 1 << 32]},
    "b8 product over 2^64 that wraps to 64": {"shape": [(1 << 32) + 1, 1 << 32, 64]},
    "b9 misaligned by 1": {"offset": 1},
    "b9 misaligned by 128": {"offset": 128},
    "b9 alignment member 0": {"alignment": 0},
    "b9 alignment member 2^30": {"alignment": 1 << 30},
}


@pytest.mark.parametrize("lie", B4_TO_B9)
def test_b4_to_b9_entry_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    refused(build(tmp_path / "a", directory(entry(**B4_TO_B9[lie]))))


def test_b11_duplicates_are_refused(tmp_path: Path) -> None:
    refused(build(tmp_path / "a", directory(entry(), entry(offset=256))), "'t'", "objects[0]", "objects[1]")
    for member in ("name", "kind", "shape", "offset", "bytes"):
        text = directory(entry()).decode()
        value = json.dumps(entry()[member])
        twice = text.replace(f'"{member}": {value}', f'"{member}": {value}, "{member}": {value}', 1)
        assert twice != text
        refused(build(tmp_path / "b", twice.encode()), member)
    root = directory(entry()).decode()
    refused(build(tmp_path / "c", (root[:-1] + ', "objects": []}').encode()), "objects")


DIALECT: dict[str, Callable[[bytes], bytes]] = {
    "NaN": lambda t: t.replace(b'"offset": 0', b'"offset": NaN'),
    "Infinity": lambda t: t.replace(b'"offset": 0', b'"offset": Infinity'),
    "-Infinity": lambda t: t.replace(b'"offset": 0', b'"offset": -Infinity'),
    "1e400": lambda t: t.replace(b'"offset": 0', b'"offset": 1e400'),
    "0.0": lambda t: t.replace(b'"offset": 0', b'"offset": 0.0'),
    "256e0": lambda t: t.replace(b'"bytes": 256', b'"bytes": 256e0'),
    "-0": lambda t: t.replace(b'"offset": 0', b'"offset": -0'),
    "true": lambda t: t.replace(b'"offset": 0', b'"offset": true'),
    "false": lambda t: t.replace(b'"offset": 0', b'"offset": false'),
    "null": lambda t: t.replace(b'"offset": 0', b'"offset": null'),
    "string": lambda t: t.replace(b'"offset": 0', b'"offset": "0"'),
    "leading zero": lambda t: t.replace(b'"bytes": 256', b'"bytes": 0256'),
    "plus sign": lambda t: t.replace(b'"bytes": 256', b'"bytes": +256'),
    "hexadecimal": lambda t: t.replace(b'"bytes": 256', b'"bytes": 0x100'),
    "5,000 digits": lambda t: t.replace(b'"bytes": 256', b'"bytes": 1' + b"0" * 5_000),
    "byte-order mark": lambda t: b"\xef\xbb\xbf" + t,
    "UTF-16": lambda t: t.decode().encode("utf-16"),
    "lone surrogate": lambda t: t.replace(b'"t"', rb'"\ud800"'),
    "raw lone surrogate": lambda t: t.replace(b'"t"', b'"\xed\xa0\x80"'),
    "overlong encoding": lambda t: t.replace(b'"t"', b'"\xc0\xb4"'),
    "NUL in a name": lambda t: t.replace(b'"t"', rb'"t\u0000"'),
    "raw NUL in a name": lambda t: t.replace(b'"t"', b'"t\x00"'),
    "escape character in a name": lambda t: t.replace(b'"t"', rb'"\u001b[31m"'),
    "C1 control in a name": lambda t: t.replace(b'"t"', rb'"\u009b31m"'),
    "raw line break in a name": lambda t: t.replace(b'"t"', b'"t\n"'),
    "comment": lambda t: t + b" // end",
    "trailing comma": lambda t: t.replace(b"}]", b"},]"),
    "single quotes": lambda t: t.replace(b'"', b"'"),
    "two documents": lambda t: t + t,
    "trailing NUL": lambda t: t + b"\0",
    "deep nesting": lambda t: b"[" * 100_000 + b"]" * 100_000,
    "deep objects": lambda t: b'{"a":' * 100_000,
    "a million commas": lambda t: t.replace(b'"shape": [64]', b'"shape": [' + b",".join([b"1"] * 1_000_000) + b"]"),
}


@pytest.mark.parametrize("dialect", DIALECT)
def test_b13_text_outside_strict_json_is_refused(dialect: str, tmp_path: Path) -> None:
    text = DIALECT[dialect](directory(entry()))
    assert text != directory(entry())
    ran = refused(build(tmp_path / "a", text))
    assert all(c.isprintable() or c == "\n" for c in ran.out)
    assert len(ran.out) < 2_000


def test_b13_names_that_look_alike_fail_strict_only(tmp_path: Path) -> None:
    for first, other in (("t", "T"), ("\u00e9", "e\u0301")):
        path = build(tmp_path / "a", directory(entry(name=first), entry(name=other, offset=256)), 512)
        assert ninfer_verify("check", path).code == 0
        ran = ninfer_verify("check", "--strict", path)
        assert ran.code == 1
        assert "[name]" in ran.out


CUTS = sorted({*range(18), JSON_END - 1, JSON_END, JSON_END + 1, 4095, 4096, 4097, SIZE - 4613, SIZE - 1})


@pytest.mark.parametrize("cut", CUTS)
def test_b14_cut_file_is_bad_at_every_level_and_never_a_traceback(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(CONTENT[:cut])
    for options in ((), ("--full",), ("--strict",), ("--level", "numeric"), ("--level", "header")):
        ran = ninfer_verify("check", *options, path)
        header_is_whole = cut >= 4096 and "header" in options
        assert ran.code == (0 if header_is_whole else 1), (options, ran)
        assert ran.err == ""
    for command in ("index", "show", "migrate"):
        ran = ninfer_verify(command, path)
        assert ran.code == 1
        assert ran.err.startswith("error: ")
        assert ran.err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("indexed") / "a.ninfer"
    path.write_bytes(CONTENT)
    write_index(build_index(path), index_path(path))
    return path


def test_b15_every_flipped_byte_is_found_with_an_index_and_named(indexed: Path, tmp_path: Path) -> None:
    """One bit of every 13th byte: header, padding, payloads and gaps."""
    for position in range(0, SIZE, 13):
        bad = flipped(indexed, tmp_path / "bad", position, bit=position % 8)
        report = verify(bad, "full", index=index_path(indexed))
        assert report.exit_code == 1, f"byte {position}"
        found = [problem for problem in report.problems if problem.code == "digest"]
        assert [problem.object for problem in found] == [region_of(indexed, position)]
        begin, end = found[0].byte_range or (0, 0)
        assert begin <= position < end


FLIPS = {0: "header", 100: "header", 2000: "padding", 4096: "frontend/note.json", 4200: "padding", 9000: "quant/nvfp4"}


@pytest.mark.parametrize("position, where", FLIPS.items())
def test_b15_command_names_the_damaged_part(position: int, where: str, indexed: Path, tmp_path: Path) -> None:
    bad = flipped(indexed, tmp_path / "bad.ninfer", position, bit=1)
    ran = ninfer_verify("check", "--full", "--index", index_path(indexed), bad)
    assert ran.code == 1
    assert where in ran.out
    document = ninfer_verify("check", "--full", "--json", "--index", index_path(indexed), bad).json
    assert where in {problem["object"] for problem in document["files"][0]["problems"]}


def test_b15_without_an_index_a_known_digest_or_strict_finds_the_flip(indexed: Path, tmp_path: Path) -> None:
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(ninfer_verify("sums", indexed).out)
    for position in (2000, 4200, 9000):
        bad = flipped(indexed, tmp_path / "a.ninfer", position)
        assert ninfer_verify("check", "--full", bad).code == 0  # nothing known to compare with
        assert ninfer_verify("check", "--sums", sums, bad).code == 1
        assert ninfer_verify("check", "--strict", bad).code == (1 if position < 9000 else 0)


def test_b16_errors_are_our_own_types_not_those_of_a_json_library(tmp_path: Path) -> None:
    path = build(tmp_path / "a", b"{")
    with pytest.raises(NinferError) as caught:
        Artifact.open(path)
    assert type(caught.value).__module__ == "ninfer_format.errors"
    assert caught.value.__cause__ is None
