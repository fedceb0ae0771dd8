"""NVRTC through ctypes: found among the NVIDIA wheels, in a CUDA toolkit or by the system's loader; needs no card."""

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ninfer_format.errors import MissingExtraError, NinferError

_WHEEL_FOLDERS = ("cu13/lib", "cu13/bin", "cuda_nvrtc/lib")
_TOOLKIT_FOLDERS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
_LOADER_NAMES = ("libnvrtc.so.13", "libnvrtc.so")
_OLDEST = (13, 0)


class NvrtcError(NinferError):
    """A call of NVRTC that failed for another reason than the source text."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """What one compilation gave: the cubin (None when the source was refused) and the log of compiler and assembler."""

    cubin: bytes | None
    log: str


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for folder in _WHEEL_FOLDERS:
            yield from map(str, sorted(Path(root, folder).glob("libnvrtc.so.*"), reverse=True))
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    for home in (*filter(None, homes), "/usr/local/cuda"):
        for folder in _TOOLKIT_FOLDERS:
            yield from map(str, sorted(Path(home, folder).glob("libnvrtc.so.*"), reverse=True))
    yield from _LOADER_NAMES


class Nvrtc:
    """One loaded libnvrtc, version 13.0 or newer."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self._library = library
        self.path = path
        self.version = self._version()
        library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = self._library.nvrtcGetErrorString(code).decode()
            raise NvrtcError(f"{name} of NVRTC {self.version[0]}.{self.version[1]} failed: {text}")

    def capabilities(self) -> tuple[int, ...]:
        """Compute capabilities it compiles for, as 10 · major + minor, ascending."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        listed = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", listed)
        return tuple(listed)

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw[: size.value]

    def compile(self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]) -> Compilation:
        """Compile one translation unit; ``headers`` are the texts that its ``#include "…"`` lines may name."""
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
        )
        try:
            failed = self._library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._bytes(program, "ProgramLog").replace(b"\0", b"").decode(errors="replace")
            if failed:
                return Compilation(None, log or self._library.nvrtcGetErrorString(failed).decode())
            return Compilation(self._bytes(program, "CUBIN"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def nvrtc() -> Nvrtc:
    """The first libnvrtc of a usable version. MissingExtraError when there is none."""
    too_old = ""
    for path in _candidates():
        try:
            found = Nvrtc(ctypes.CDLL(path), path)
        except (OSError, AttributeError):
            continue
        if found.version >= _OLDEST:
            return found
        too_old = f" (found {found.version[0]}.{found.version[1]} at {path})"
    raise MissingExtraError(
        f"compiling kernels needs NVRTC {_OLDEST[0]}.{_OLDEST[1]} or newer{too_old}; "
        "install it with: pip install 'ninfer[cuda]'"
    )
