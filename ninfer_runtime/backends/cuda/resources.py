"""What a compiled kernel takes from an SM, read from the cubin itself and the assembler's log.

Registers and stack come from the ELF's ``.nv.info`` section, spills and static shared memory from the ``ptxas -v`` part
of the log: the stack also holds arrays that are indexed at run time, so only the log tells a spill from those.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ninfer_format.errors import NinferError
from ninfer_format.geometry import up
from ninfer_runtime.backends.cuda.compiler import capability_of

MAX_SHARED_PER_BLOCK = 101_376
"""Most shared memory of a block on any card: the limit of sm_120, kept everywhere so that what was tested ships."""

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_INFO_HEAD = struct.Struct("<BBH")
_SIZED, _REGISTER_COUNT, _FRAME_SIZE = 0x04, 0x2F, 0x11
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")

_WARP = 32
_REGISTER_UNIT = 256  # a warp gets registers in this unit
_WARP_UNIT = 4  # an SM has four schedulers with equal shares of the registers
_SHARED_UNIT = 128
_RESERVED_SHARED = 1024  # per block, the driver's own


class CubinError(NinferError):
    """Machine code that cannot be read: not an ELF file, or without the kernel."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one kernel. ``local_bytes`` per thread (its stack), spills in bytes of code as the assembler counts them."""

    registers: int
    local_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int

    @property
    def spill_bytes(self) -> int:
        """Spill stores and loads together."""
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What one SM has: 32-bit registers, resident warps and blocks, bytes of shared memory."""

    registers: int
    warps: int
    blocks: int
    shared_bytes: int


_KIB = 1024
_LIMITS = {
    80: SmLimits(65536, 64, 32, 164 * _KIB),
    86: SmLimits(65536, 48, 16, 100 * _KIB),
    87: SmLimits(65536, 48, 16, 164 * _KIB),
    89: SmLimits(65536, 48, 24, 100 * _KIB),
    90: SmLimits(65536, 64, 32, 228 * _KIB),
    100: SmLimits(65536, 64, 32, 228 * _KIB),
    103: SmLimits(65536, 64, 32, 228 * _KIB),
    110: SmLimits(65536, 48, 24, 228 * _KIB),
    120: SmLimits(65536, 48, 24, 100 * _KIB),
    121: SmLimits(65536, 48, 24, 100 * _KIB),
}


def limits_of(arch: str) -> SmLimits:
    """Limits of the SMs that run ``arch``; those of the nearest older generation for one that is not listed."""
    capability = capability_of(arch)
    return _LIMITS[max(known for known in _LIMITS if known <= capability)]


def blocks_per_sm(resources: Resources, threads: int, shared_bytes: int, limits: SmLimits) -> int:
    """Blocks of ``threads`` threads and ``shared_bytes`` of dynamic shared memory that one SM holds at once."""
    warps = -(-threads // _WARP)
    per_warp = up(max(1, resources.registers) * _WARP, _REGISTER_UNIT)
    warps_by_registers = limits.registers // per_warp // _WARP_UNIT * _WARP_UNIT
    shared = up(shared_bytes + resources.static_shared_bytes + _RESERVED_SHARED, _SHARED_UNIT)
    bounds = (limits.blocks, limits.warps // warps, warps_by_registers // warps, limits.shared_bytes // shared)
    return min(bounds)


def _sections(image: bytes) -> dict[str, tuple[int, int, bytes]]:
    """name -> (type, link, content) of every section."""
    if image[:6] != b"\x7fELF\x02\x01" or len(image) < 64:
        raise CubinError("the machine code is not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", image, 58)
    heads = [_SECTION.unpack_from(image, table + index * entry_bytes) for index in range(count)]
    names = image[heads[names_index][4] :]
    found = {}
    for name, kind, _flags, _address, offset, size, link, *_rest in heads:
        text = names[name : names.index(b"\0", name)].decode()
        found[text] = (kind, link, image[offset : offset + size])
    return found


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of the sized entries of an ``.nv.info`` section."""
    at = 0
    while at + _INFO_HEAD.size <= len(content):
        form, attribute, size = _INFO_HEAD.unpack_from(content, at)
        at += _INFO_HEAD.size
        if form == _SIZED:
            yield attribute, content[at : at + size]
            at += size


def _log_of(log: str, kernel: str) -> str:
    """The assembler's lines about one kernel."""
    pieces = _ENTRY.split(log)
    return next((text for name, text in zip(pieces[1::2], pieces[2::2], strict=True) if name == kernel), "")


def read_resources(image: bytes, log: str) -> dict[str, Resources]:
    """Resources of every kernel of a cubin, by entry point. CubinError for something else than a cubin."""
    try:
        sections = _sections(image)
        symbols, names = sections[".symtab"][2], sections[".strtab"][2]
        numbers: dict[int, dict[str, int]] = {_REGISTER_COUNT: {}, _FRAME_SIZE: {}}
        for attribute, value in _attributes(sections[".nv.info"][2]):
            if attribute in numbers:
                index, number = struct.unpack("<II", value)
                start = _SYMBOL.unpack_from(symbols, index * _SYMBOL.size)[0]
                numbers[attribute][names[start : names.index(b"\0", start)].decode()] = number
    except (struct.error, ValueError, KeyError, IndexError) as error:
        raise CubinError(f"the machine code cannot be read: {type(error).__name__}") from None
    found = {}
    for kernel, registers in numbers[_REGISTER_COUNT].items():
        text = _log_of(log, kernel)
        spills, shared = _SPILLS.search(text), _STATIC_SHARED.search(text)
        found[kernel] = Resources(
            registers,
            numbers[_FRAME_SIZE].get(kernel, 0),
            int(spills[1]) if spills else 0,
            int(spills[2]) if spills else 0,
            int(shared[1]) if shared else 0,
        )
    return found


def resources_of(image: bytes, log: str, kernel: str) -> Resources:
    """Resources of one entry point. CubinError when the cubin lacks it."""
    found = read_resources(image, log)
    if kernel not in found:
        raise CubinError(f"the machine code has no kernel {kernel!r}, only {', '.join(sorted(found)) or 'none'}")
    return found[kernel]
