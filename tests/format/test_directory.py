"""The directory is read strictly, in bounded memory, and spelled canonically."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer_format.directory import (
    Directory,
    Identity,
    ResourceEntry,
    TensorEntry,
    canonical_json,
    check_objects,
    parse_directory,
    parse_directory_v1,
)
from ninfer_format.errors import (
    DirectoryError,
    GeometryError,
    NinferError,
    RegistryError,
    SignatureError,
    TruncatedError,
    UsageError,
)

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
RESOURCE = '{"name":"a","kind":"resource","encoding":"raw-bytes-v1","offset":0,"bytes":3}'
SCALAR = '{"name":"b","kind":"tensor","shape":[],"format":"FP32","layout":"contiguous-le-v1","offset":256,"bytes":4}'


def text(*entries: str, identity: str = '{"model_id":"m","weights_id":"w"}') -> bytes:
    return f'{{"identity":{identity},"objects":[{",".join(entries)}]}}'.encode()


def test_example_of_the_specification_round_trips_byte_for_byte() -> None:
    directory = parse_directory(text(RESOURCE, SCALAR))
    assert directory == Directory(
        Identity("m", "w"),
        (
            ResourceEntry("a", "raw-bytes-v1", 0, 3),
            TensorEntry("b", (), "FP32", "contiguous-le-v1", 256, 4),
        ),
    )
    assert canonical_json(directory) == text(RESOURCE, SCALAR)


@pytest.mark.parametrize("file", ["tiny_v2.ninfer", "tiny_v1_migrated.ninfer"])
def test_golden_directories_have_the_canonical_spelling(file: str) -> None:
    blob = (GOLDEN / file).read_bytes()
    body = blob[16 : 16 + int.from_bytes(blob[8:16], "little")]
    facts = next(c for c in json.loads((GOLDEN / "index.json").read_text())["containers"] if c["file"] == file)
    assert hashlib.sha256(canonical_json(parse_directory(body))).hexdigest() == facts["directory_sha256"]


def test_strings_keep_their_characters_and_minimal_escapes() -> None:
    entry = RESOURCE.replace('"a"', '"caf\\u00e9 \\"x\\" \\/ 模"')
    directory = parse_directory(text(entry))
    assert directory.objects[0].name == 'café "x" / 模'
    assert 'café \\"x\\" / 模'.encode() in canonical_json(directory)


BAD_TEXTS = {
    "duplicate member in the root": b'{"identity":{"model_id":"m","weights_id":"w"},"identity":{},"objects":[]}',
    "duplicate member in an entry": text(RESOURCE.replace('"offset":0', '"offset":0,"offset":0')),
    "duplicate member spelled with an escape": text(RESOURCE.replace('"offset":0', '"offset":0,"\\u006fffset":0')),
    "minus zero": text(RESOURCE.replace('"offset":0', '"offset":-0')),
    "real zero": text(RESOURCE.replace('"offset":0', '"offset":0.0')),
    "exponent": text(RESOURCE.replace('"bytes":3', '"bytes":3e0')),
    "overflowing exponent": text(RESOURCE.replace('"bytes":3', '"bytes":1e400')),
    "NaN": text(RESOURCE.replace('"bytes":3', '"bytes":NaN')),
    "Infinity": text(RESOURCE.replace('"bytes":3', '"bytes":Infinity')),
    "minus Infinity": text(RESOURCE.replace('"bytes":3', '"bytes":-Infinity')),
    "true as an integer": text(RESOURCE.replace('"bytes":3', '"bytes":true')),
    "null": text(RESOURCE.replace('"bytes":3', '"bytes":null')),
    "2^63": text(RESOURCE.replace('"bytes":3', '"bytes":9223372036854775808')),
    "2^64": text(RESOURCE.replace('"bytes":3', '"bytes":18446744073709551616')),
    "5000 digits": text(RESOURCE.replace('"bytes":3', '"bytes":' + "9" * 5000)),
    "byte-order mark": b"\xef\xbb\xbf" + text(RESOURCE),
    "UTF-16": text(RESOURCE).decode().encode("utf-16"),
    "NUL in a name": text(RESOURCE.replace('"a"', '"a\\u0000b"')),
    "control character in a name": text(RESOURCE.replace('"a"', '"a\\u0085b"')),
    "lone surrogate in a name": text(RESOURCE.replace('"a"', '"a\\ud800"')),
    "lone surrogate in the identity": text(RESOURCE, identity='{"model_id":"\\udfff","weights_id":"w"}'),
    "raw control character in a string": text(RESOURCE.replace('"a"', '"a\x01"')),
    "single quotes": text(RESOURCE).replace(b'"', b"'"),
    "comment": text(RESOURCE) + b"/* */",
    "two documents": text(RESOURCE) * 2,
    "trailing comma": text(RESOURCE + ","),
    "unterminated": text(RESOURCE)[:-1],
    "unterminated string": b'{"identity',
    "nothing": b"",
    "white space only": b"   ",
    "a number": b"17",
    "ten thousand open arrays": b"[" * 10_000,
    "deep object": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "shape nested in shape": text(SCALAR.replace("[]", "[[1]]")),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_text_outside_the_strict_dialect_is_refused(name: str) -> None:
    with pytest.raises(DirectoryError):
        parse_directory(BAD_TEXTS[name])


def test_errors_name_the_object_the_value_and_the_expectation() -> None:
    with pytest.raises(DirectoryError, match=r"object 'a': bytes is -3, expected 1 to"):
        parse_directory(text(RESOURCE.replace('"bytes":3', '"bytes":-3')))
    with pytest.raises(DirectoryError, match=r"object name 'a' is used by objects\[0\] and objects\[1\]"):
        parse_directory(text(RESOURCE, RESOURCE))
    with pytest.raises(DirectoryError, match=r"unknown member 'gpu'"):
        parse_directory(text(RESOURCE.replace('"offset"', '"gpu":1,"offset"')))


def tensor(shape: list[int], format: str = "BF16", layout: str = "contiguous-le-v1", n_bytes: int = 2) -> Directory:
    return Directory(Identity("m", "w"), (TensorEntry("t", tuple(shape), format, layout, 0, n_bytes),))


def test_products_beyond_two_to_the_63_are_refused() -> None:
    for shape in ([2**40, 2**40], [2**62, 2], [3] * 16 + [1]):
        with pytest.raises((GeometryError, SignatureError)) as caught:
            check_objects(tensor(shape, n_bytes=8).objects, 1 << 20)
        assert "'t'" in str(caught.value)
    with pytest.raises((GeometryError, SignatureError)):
        check_objects(tensor([2**40, 2**30], "Q4G64_F16S", "row-split-k128-v1", 8).objects, 1 << 20)


def test_rank_of_a_million_is_refused_quickly() -> None:
    entry = SCALAR.replace("[]", "[" + ",".join(["1"] * 1_000_000) + "]")
    with pytest.raises(DirectoryError):
        parse_directory(text(entry))


@pytest.mark.parametrize(
    ("objects", "error", "words"),
    [
        ([("a", 0, 10), ("b", 5, 10)], GeometryError, "'a'"),
        ([("a", 0, 10), ("b", 0, 10)], GeometryError, "'a'"),
        ([("a", 100, 10), ("b", 0, 10)], GeometryError, "'b'"),
        ([("a", 2**40, 10)], TruncatedError, "1000 payload bytes"),
        ([("a", 0, 1001)], TruncatedError, "1001"),
        ([("a", 2**63 - 1, 10)], GeometryError, "2\\^63"),
    ],
)
def test_spans_outside_the_rules_are_refused(
    objects: list[tuple[str, int, int]], error: type[NinferError], words: str
) -> None:
    entries = [ResourceEntry(name, "raw-bytes-v1", offset, size) for name, offset, size in objects]
    with pytest.raises(error, match=words):
        check_objects(entries, 1000)


def test_spans_that_touch_or_leave_gaps_are_accepted() -> None:
    check_objects([ResourceEntry("a", "raw-bytes-v1", 0, 10), ResourceEntry("b", "raw-bytes-v1", 10, 10)], 20)
    check_objects([ResourceEntry("a", "raw-bytes-v1", 7, 10), ResourceEntry("b", "raw-bytes-v1", 500, 10)], 1000)


def test_ten_thousand_objects_on_one_range_are_refused() -> None:
    entries = [ResourceEntry(f"o{i}", "raw-bytes-v1", 0, 10) for i in range(10_000)]
    with pytest.raises(GeometryError, match="'o1'"):
        check_objects(entries, 1000)


def test_unknown_names_are_unsupported_and_mismatches_are_wrong() -> None:
    with pytest.raises(RegistryError) as unknown:
        check_objects(tensor([2], "FP16").objects, 100)
    with pytest.raises(SignatureError) as mismatch:
        check_objects(tensor([2, 64], "Q4G64_F16S").objects, 100)
    assert (unknown.value.exit_code, mismatch.value.exit_code) == (4, 1)


def test_version_1_root_differs_only_in_its_members() -> None:
    v1 = f'{{"model_id":"m","objects":[{RESOURCE}]}}'.encode()
    assert parse_directory_v1(v1).objects == parse_directory(text(RESOURCE)).objects
    with pytest.raises(DirectoryError):
        parse_directory(v1)
    with pytest.raises(DirectoryError):
        parse_directory_v1(text(RESOURCE))


@pytest.mark.parametrize("bad", ["", "m", "m/", "/w", "a/b/c"])
def test_identity_text_needs_two_parts(bad: str) -> None:
    with pytest.raises(UsageError):
        Identity.parse(bad)
    assert str(Identity.parse("m/w")) == "m/w"


HOSTILE = {
    "empty objects": "b'[' + b'{},' * 2_796_000 + b'{}]'",
    "empty arrays": "b'[' + b'[],' * 2_796_000 + b'[]]'",
    "small integers": "b'[' + b'999,' * 2_097_000 + b'9]'",
    "short wide strings": "b'[' + '\"\\u0100\",'.encode() * 1_677_000 + b'1]'",
    "members": "b'{' + b'\"a\":1,' * 1_398_000 + b'\"b\":1}'",
    "backslashes": "b'\"' + b'\\\\' * 8_388_000 + b'\"'",
    "one emoji and eight megabytes of text": "b'\"' + '\\U0001f642'.encode() + b'a' * 8_388_000 + b'\"'",
    "quotes": "b'\"' * 8_388_000",
    "brackets in strings": "b'[' + b'\"[[{{\",' * 1_048_000 + b'1]'",
    "plausible entries": (
        'b\'{"identity":{"model_id":"m","weights_id":"w"},"objects":[\' + b\',\'.join(b\'{"name":"%d",\''
        'b\'"kind":"resource","encoding":"raw-bytes-v1","offset":0,"bytes":3}\' % i for i in range(95_000)) + b\']}\''
    ),
}
PROBE = """
import time
from ninfer_format.directory import parse_directory
from ninfer_format.errors import NinferError
from tests.peak_memory import peak_rss_bytes
text = {expression}
assert len(text) <= 8 << 20, len(text)
start = time.process_time()
try:
    parse_directory(text)
except NinferError as error:
    print(str(error)[:100])
seconds = time.process_time() - start
print(peak_rss_bytes() / 2**20, seconds)
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_eight_megabyte_directory_stays_under_300_mb_and_10_s(name: str) -> None:
    code = PROBE.format(expression=HOSTILE[name])
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    peak_mib, seconds = map(float, done.stdout.splitlines()[-1].split())
    assert peak_mib < 300, f"{name}: {peak_mib:.0f} MiB"
    assert seconds < 10, f"{name}: {seconds:.1f} s"
