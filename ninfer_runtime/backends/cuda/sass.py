"""Instructions of a kernel's main loop, counted in its disassembly: what a warp issues per weight byte.

The main loop is the innermost backward branch span with the most matrix instructions, the shortest of several; in a
kernel without any, the one that loads most from global memory, then the longest. Optional: needs nvdisasm (wheel
``nvidia-cuda-nvdisasm`` or a CUDA toolkit).
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ninfer_format.errors import MissingExtraError
from ninfer_runtime.backends.cuda.resources import CubinError

_SECTION = re.compile(r"^//-+ \.text\.(\w+)\s", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:\{\s*)?(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_MATRIX = ("HMMA", "IMMA", "QMMA", "OMMA", "DMMA", "HGMMA", "IGMMA")
_LOADS = ("LDG", "LDGSTS")
_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True, slots=True)
class Loop:
    """One backward branch span: its instructions, matrix instructions, bytes a lane loads from global memory.

    ``n_copy_groups``: groups of asynchronous copies, of which a kernel with a ring makes one per step.
    """

    n_instructions: int
    n_matrix: int
    global_bytes: int
    n_copy_groups: int

    def per_byte(self, weight_bytes: int) -> float:
        """Warp instructions per weight byte, when one pass of one warp uses ``weight_bytes`` of weights."""
        return self.n_instructions / weight_bytes


@dataclass(frozen=True, slots=True)
class _Instruction:
    address: int
    operation: str
    target: int | None  # address of a branch's label

    @property
    def is_matrix(self) -> bool:
        return self.operation.partition(".")[0] in _MATRIX

    @property
    def global_bytes(self) -> int:
        name, *modifiers = self.operation.split(".")
        if name not in _LOADS:
            return 0
        return next((_WIDTHS[modifier] for modifier in modifiers if modifier in _WIDTHS), 4)


@cache
def _disassembler() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    roots = list((spec.submodule_search_locations or ()) if spec else ())
    places = [Path(root, folder) for root in roots for folder in ("cu13/bin", "cuda_nvdisasm/bin")]
    homes = filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"))
    places += [Path(home, "bin") for home in homes]
    found = next((place / "nvdisasm" for place in places if os.access(place / "nvdisasm", os.X_OK)), None)
    return str(found) if found else shutil.which("nvdisasm")


def disassemble(image: bytes) -> str:
    """The text of a cubin's code. MissingExtraError without nvdisasm, CubinError when it refuses the file."""
    tool = _disassembler()
    if tool is None:
        raise MissingExtraError("counting instructions needs nvdisasm; pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as stream:
        stream.write(image)
        stream.flush()
        run = subprocess.run([tool, "-c", stream.name], capture_output=True, text=True, check=False)
    if run.returncode:
        raise CubinError(f"nvdisasm refuses the machine code: {run.stderr.strip().partition(chr(10))[0]}")
    return run.stdout


def _code_of(text: str, kernel: str) -> list[_Instruction]:
    pieces = _SECTION.split(text)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    if kernel not in sections:
        raise CubinError(f"the machine code has no kernel {kernel!r}, only {', '.join(sorted(sections)) or 'none'}")
    found: list[tuple[int, str, str | None]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in sections[kernel].splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif match := _INSTRUCTION.search(line):
            address = int(match[1], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting.clear()
            target = _TARGET.search(match[3]) if match[2].startswith("BRA") else None
            found.append((address, match[2], target[1] if target else None))
    return [_Instruction(address, name, labels.get(target) if target else None) for address, name, target in found]


def _loops(code: list[_Instruction]) -> Iterator[tuple[int, int, Loop]]:
    """(first address, last address, counts) of every backward branch; one that jumps to itself is the padding's."""
    for branch in code:
        if branch.target is not None and branch.target < branch.address:
            body = [one for one in code if branch.target <= one.address <= branch.address and one.operation != "NOP"]
            matrix, copied = sum(one.is_matrix for one in body), sum(one.operation == "LDGDEPBAR" for one in body)
            loaded = sum(one.global_bytes for one in body)
            yield branch.target, branch.address, Loop(len(body), matrix, loaded, copied)


def main_loop(image: bytes, kernel: str) -> Loop | None:
    """The main loop of one entry point, None when it has no loop at all. MissingExtraError, CubinError."""
    loops = list(_loops(_code_of(disassemble(image), kernel)))

    def holds_a_better_one(first: int, last: int, outer: Loop) -> bool:
        inner = [loop for begin, end, loop in loops if first <= begin and end <= last and (begin, end) != (first, last)]
        if outer.n_matrix:
            return any(loop.n_matrix for loop in inner)
        return any(loop.global_bytes for loop in inner) if outer.global_bytes else bool(inner)

    def rank(loop: Loop) -> tuple[int, int, int]:
        # An outer loop that is entered behind its head has the products of the inner one and more of the rest.
        if loop.n_matrix:
            return loop.n_matrix, -loop.n_instructions, 0
        return 0, loop.global_bytes, loop.n_instructions

    innermost = [loop for first, last, loop in loops if not holds_a_better_one(first, last, loop)]
    return max(innermost, key=rank, default=None)


def instructions_per_loop(image: bytes, kernel: str) -> int:
    """Instructions of one pass of the main loop, 0 when there is no loop. MissingExtraError, CubinError."""
    loop = main_loop(image, kernel)
    return loop.n_instructions if loop else 0
