"""Mutated headers, drawn by hypothesis, through every reader of a container; prints one JSON line of measurements.

    python -m tests.property.header_mutations [--examples 10000] [--seed N]

Ends with a traceback, and a falsifying example, when a mutation makes something raise other than a typed error.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import struct
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from ninfer_format.directory import canonical_json
from ninfer_format.errors import NinferError
from ninfer_format.migration import migrate
from ninfer_format.reader import Artifact
from ninfer_format.verifier import verify
from tests.format.samples import GOLDEN, custom_inventory, ninfer_verify
from tests.peak_memory import peak_rss_bytes

TOKENS = (
    b"null", b"true", b"-0", b"0", b"-1", b"1e999", b"NaN", b"256.0", b"18446744073709551616", b"9223372036854775807",
    b"9" * 400, b'""', b'"\\ud800"', b'"\\u0000"', b"[]", b"{}", b"[1,2,3]", b'{"a":1}', b"[" * 200, b"{" * 50,
    b'"name":"x",', b'"offset":', b",", b":", b'"', b"\\", b"\xff", b"\xef\xbb\xbf", b"\x00", b" " * 1000,
    b"[[]]" * 500, b" ", b" ", b"\n", b"\t", b"1", b"64", b"128", b"256", b"512", b"768", b"2048", b"4096",
    b"[1]", b"[64]",
    b'"BF16"', b'"FP32"', b'"I32"', b'"a"', b'"b/c"', b'"contiguous-le-v1"',
    b'"NVFP4"', b'"Q4G64_F16S"', b'"row-split-k128-v1"', b'"blockscale-k16-m128x4-v1"', b'"tensor"', b'"resource"',
    b'"raw-bytes-v1"', b"[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", b"[4294967296,4294967296,4294967296]",
    b'{"name":"a","kind":"resource","encoding":"raw-bytes-v1","offset":0,"bytes":1},' * 40,
)  # fmt: skip
LENGTHS = (0, 1, 15, 16, 4080, 4096, 1 << 20, 8 << 20, (8 << 20) + 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)
HEAD_BYTES = 1 << 16
SLOWEST = 5.0
"""Seconds of processor time that the readers together may take for one file."""


def sources() -> dict[str, tuple[int, bytes, bytes, int]]:
    """Name → (version, directory text, payload, number of zero bytes behind it)."""
    found = {}
    for name in ("tiny_v2", "tiny_v1", "malformed/ok-baseline", "malformed/ok-escapes"):
        content = (GOLDEN / f"{name}.ninfer").read_bytes()
        n = int.from_bytes(content[8:16], "little")
        found[name] = (content[7], content[16 : 16 + n], content[4096:], 0)
    planned, _ = custom_inventory()
    found["custom"] = (2, canonical_json(planned.directory), b"", planned.payload_bytes)
    return found


SOURCES = sources()


@dataclass(frozen=True, slots=True)
class Mutant:
    """A header and what stands behind it: the payload of ``source``, where the new text says it starts or not."""

    source: str
    header: bytes
    realigned: bool
    cut: float | None

    def write(self, path: Path) -> None:
        """Make the file; zero payloads are holes, so that large ones cost nothing."""
        _, text, payload, n_zeros = SOURCES[self.source]
        padding = -(len(self.header) if self.realigned else 16 + len(text)) % 4096
        path.write_bytes(self.header + bytes(padding) + payload)
        size = path.stat().st_size + n_zeros
        os.truncate(path, size if self.cut is None else int(size * self.cut))


UNCHANGED = Mutant("tiny_v2", (GOLDEN / "tiny_v2.ninfer").read_bytes()[: 16 + len(SOURCES["tiny_v2"][1])], True, None)
"""What every reader accepts, however few mutants are."""


@st.composite
def mutants(draw: st.DrawFn) -> Mutant:
    """A header that went through one to six edits; its length field mostly follows the text."""
    source = draw(st.sampled_from(sorted(SOURCES)))
    version, text, _, _ = SOURCES[source]
    body = bytearray(text)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3, 6)))):
        at = draw(st.integers(0, len(body)))
        width = draw(st.sampled_from((0, 1, 1, 2, 5, 17, 300)))
        edit = draw(st.sampled_from(("flip", "token", "value", "value", "value", "remove", "repeat", "move", "bytes")))
        if edit == "flip" and at < len(body):
            body[at] ^= 1 << draw(st.integers(0, 7))
        elif edit == "token":
            body[at : at + width] = draw(st.sampled_from(TOKENS))
        elif edit == "value":  # the next number or string after a colon
            begin = body.find(b":", at) + 1
            end = min((i for i in (body.find(b",", begin), body.find(b"}", begin)) if i > 0), default=begin)
            body[begin:end] = draw(st.sampled_from(TOKENS))
        elif edit == "remove":
            del body[at : at + width]
        elif edit == "repeat":
            body[at:at] = body[at : at + width] * draw(st.integers(1, 60))
        elif edit == "move":
            piece = bytes(body[at : at + width])
            del body[at : at + width]
            target = draw(st.integers(0, len(body)))
            body[target:target] = piece
        else:
            body[at:at] = draw(st.binary(min_size=1, max_size=12))
    follows = draw(st.integers(0, 9)) < 9
    length = len(body) if follows else draw(st.sampled_from(LENGTHS) | st.integers(0, (1 << 64) - 1))
    magic = b"NINFER\0" + bytes([version if draw(st.integers(0, 29)) else draw(st.integers(0, 255))])
    header = magic + struct.pack("<Q", length) + bytes(body)
    cut = None if draw(st.integers(0, 19)) else draw(st.floats(0, 1))
    return Mutant(source, header, bool(draw(st.integers(0, 9))), cut)


def read_every_way(path: Path) -> str:
    """Refused or accepted, the same by every reader; AssertionError when one of them misbehaves."""
    size, start = path.stat().st_size, path.read_bytes()[:HEAD_BYTES]
    try:
        with Artifact.open(path) as artifact:
            n_objects = len(artifact.objects)
        outcome, message = "accepted", f"{n_objects} objects"
    except NinferError as error:
        outcome, message = type(error).__name__, str(error)
    assert 0 < len(message) < 2_000, message
    report = verify(path, "numeric", strict=True)
    generic = verify(path, "structure")
    if outcome != "accepted":
        assert not generic.ok
        assert not report.ok
        assert generic.exit_code in (1, 4)
    ran = ninfer_verify("check", "--full", "--json", path)
    assert ran.code == generic.exit_code, ran
    assert ran.json["files"][0]["ok"] == generic.ok
    ran = ninfer_verify("check", path)
    assert ran.code == generic.exit_code, ran
    assert "Traceback" not in ran.out + ran.err
    shown = ninfer_verify("show", "--objects", path)
    assert (shown.code == 0) == (outcome == "accepted"), shown
    try:
        if migrate(path, identity="test-model/w").action == "migrated":
            outcome = "migrated"
            assert verify(path).exit_code == 0
    except NinferError:
        assert (path.stat().st_size, path.read_bytes()[:HEAD_BYTES]) == (size, start)
    return outcome


def run(examples: int, chosen_seed: int) -> dict[str, object]:
    """Draw and check ``examples`` headers."""
    outcomes: Counter[str] = Counter()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.ninfer"

        @seed(chosen_seed)
        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(mutants())
        @example(UNCHANGED)
        def check(mutant: Mutant) -> None:
            nonlocal worst
            mutant.write(path)
            started = time.process_time()
            outcomes[read_every_way(path)] += 1
            seconds = time.process_time() - started
            worst = max(worst, seconds)
            assert seconds < SLOWEST

        started = time.perf_counter()
        check()
        total = time.perf_counter() - started
    return {
        "seed": chosen_seed,
        "examples": sum(outcomes.values()),
        "outcomes": dict(outcomes.most_common()),
        "worst_seconds": round(worst, 3),
        "seconds": round(total, 1),
        "peak_mib": peak_rss_bytes() >> 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    chosen = secrets.randbits(31) if arguments.seed is None else arguments.seed
    print(json.dumps(run(arguments.examples, chosen)))


if __name__ == "__main__":
    main()
