"""Numbers and inputs of the command line, read strictly: the whole text, nothing but what the option means."""

import math
import re
import sys
from pathlib import Path
from typing import Literal

import typer

from ninfer_format.errors import StorageError, UsageError
from ninfer_runtime.config import FfnCpu

STDIN = "-"
_UNSIGNED = re.compile(r"[0-9]{1,20}")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)(|[KMGT]i?B)")
_RATE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)(|[KMGT]i?B)/s")
_UNITS = {"": 1.0} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000.0), ("iB", 1024.0))
}
_DECIMAL = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def unsigned(text: str | int) -> int:
    """Digits only. Option defaults, which are numbers already, pass."""
    if isinstance(text, str) and not _UNSIGNED.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is not a whole number, written in digits only")
    return int(text)


def positive(text: str | int) -> int:
    """Digits only, at least 1."""
    if (number := unsigned(text)) < 1:
        raise typer.BadParameter(f"{text!r} is too small, expected at least 1")
    return number


def kv_capacity(text: str) -> int | Literal["auto"]:
    """Tokens, or ``auto``."""
    return "auto" if text == "auto" else positive(text)


def ffn_layers(text: str | None) -> int | None:
    """A number of layers; None for ``auto``."""
    return None if text in (None, "auto") else unsigned(text)


def ffn_cpu(text: str | None) -> FfnCpu:
    """A number of layers, or ``auto``."""
    return 0 if text is None else "auto" if text == "auto" else unsigned(text)


def memory_size(text: str | int) -> int:
    """Bytes, as in 17179869184, 16GiB or 16GB."""
    return int(_scaled(text, _SIZE, "a size of memory, as in 16GiB"))


def link_rate(text: str | float) -> float:
    """Bytes per second, as in 27GB/s."""
    return _scaled(text, _RATE, "a rate, as in 27GB/s")


def _scaled(text: str | float, pattern: re.Pattern[str], what: str) -> float:
    if not isinstance(text, str):
        return text
    if (found := pattern.fullmatch(text)) is None or not 0 < (number := float(found[1]) * _UNITS[found[2]]) < 2**62:
        raise typer.BadParameter(f"{text!r} is not {what}")
    return number


def integer(text: str | int) -> int:
    """Digits, after a minus or not."""
    if isinstance(text, str) and not _INTEGER.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is not a whole number")
    return int(text)


def decimal(text: str | float) -> float:
    """A finite decimal number."""
    if isinstance(text, str) and not (_DECIMAL.fullmatch(text) and math.isfinite(float(text))):
        raise typer.BadParameter(f"{text!r} is not a finite decimal number")
    return float(text)


def token_ids(text: str) -> tuple[int, ...]:
    """Ids separated by commas, or from standard input when ``text`` is ``-``."""
    parts = [part.strip() for part in (read_text(STDIN) if text == STDIN else text).split(",")]
    if parts == [""]:
        raise UsageError("--ids is empty, expected at least one token id")
    wrong = next((part for part in parts if not _TOKEN_ID.fullmatch(part)), None)
    if wrong is not None:
        raise UsageError(f"--ids: {wrong!r} is not a token id; expected digits separated by commas, as in 1,2,3")
    return tuple(int(part) for part in parts)


def read_text(source: str) -> str:
    """The text of a file, or of standard input for ``-``. UsageError when it is not UTF-8 or not there."""
    return as_text(read_bytes(source), "standard input" if source == STDIN else source)


def read_bytes(source: str) -> bytes:
    """The bytes of a file, or of standard input for ``-``."""
    if source == STDIN:
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{source}: no such file") from None
    except IsADirectoryError:
        raise UsageError(f"{source}: is a folder, expected a file") from None
    except OSError as error:
        raise StorageError(f"{source}: cannot be read: {error.strerror}") from None


def as_text(document: bytes, place: str) -> str:
    """UTF-8 decoded."""
    try:
        return document.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{place} is not UTF-8: byte {error.start} cannot be decoded") from None
