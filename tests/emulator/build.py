"""Kernel sources to shared libraries, with the machine's own C++ compiler; kept by content outside the tree."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from ninfer_format.hashing import available_cores
from ninfer_runtime.backends.cuda.compiler import INCLUDE_FOLDER, KERNEL_FOLDER, KernelSpec, Sources

HERE = Path(__file__).parent
_EMULATOR_HEADERS = ("cuda_emulator.hpp", "cuda_language.hpp", "ptx_emulated.hpp", "watch.hpp")
_COMPILERS = ("c++", "g++", "clang++")
# As NVRTC does, a*b + c becomes one fma, where the CPU has it; nothing else is reordered.
_OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=fast", "-fwrapv", "-fno-strict-aliasing")
_LEAN = ("-fno-exceptions", "-fno-rtti", "-fno-stack-protector", "-fvisibility=hidden", "-DNINFER_EMULATOR")
_X86 = ("-march=native", "-mno-red-zone", "-fcf-protection=none")
_OTHER = ("-mcpu=native",)
# A call in front of every access of the kernel's; nothing about the stack or globals.
_WATCH = (
    "-DEMULATOR_WATCH",
    "-fsanitize=kernel-address",
    "--param=asan-stack=0",
    "--param=asan-globals=0",
    "--param=asan-instrument-allocas=0",
    "--param=asan-instrumentation-with-call-threshold=0",
)


class EmulatorBuildError(Exception):
    """A kernel source that is not valid C++ under the emulator, or no compiler to build it with."""


@cache
def compiler() -> str:
    """Path of a C++ compiler. EmulatorBuildError when there is none: the tests of kernels cannot do without."""
    named = (os.environ["CXX"],) if os.environ.get("CXX") else ()
    for name in (*named, *_COMPILERS):
        if (path := shutil.which(name)) is not None:
            return str(path)
    raise EmulatorBuildError(
        f"no C++ compiler found (looked for {', '.join((*named, *_COMPILERS))}); the kernels' tests run them on the "
        "CPU and need one: install g++ (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++) or clang"
    )


@cache
def _options() -> tuple[str, ...]:
    """NINFER_EMULATOR_PORTABLE=1 builds on x86-64 what other CPUs get."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    portable = ("-DEMULATOR_PORTABLE",) if os.environ.get("NINFER_EMULATOR_PORTABLE") == "1" else ()
    return (*_OPTIONS, *_LEAN, *(_X86 if is_x86 else _OTHER), *portable)


@cache
def _machine() -> str:
    """What a native build depends on: compiler, its version, the CPU's features."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        features = next((line for line in cpu.splitlines() if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        features = platform.processor()
    return "\n".join((compiler(), version, platform.machine(), features))


@cache
def cache_folder() -> Path:
    """A folder of this user's under the system's temporary one."""
    folder = Path(tempfile.gettempdir()) / f"ninfer-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EmulatorBuildError(f"{folder} belongs to another user; remove it, or set TMPDIR to a folder of your own")
    return folder


class Builder:
    """Builds specs whose sources lie in one of ``folders``, in that order; safe to call from several threads."""

    def __init__(self, folders: Sequence[Path] = (KERNEL_FOLDER, HERE), *, watch: bool = False) -> None:
        self._folders = tuple(folders)
        if watch and "clang" in _machine():
            raise EmulatorBuildError(f"watching every access needs g++, {compiler()} is clang; set CXX=g++")
        self._options = (*_options(), *(_WATCH if watch else ()))

    def _source(self, spec: KernelSpec) -> Path:
        for folder in self._folders:
            if (path := folder / spec.source).is_file():
                return path
        raise EmulatorBuildError(f"kernel {spec.variant}: no {spec.source} in {', '.join(map(str, self._folders))}")

    def library(self, spec: KernelSpec) -> Path:
        """Path of the built library. EmulatorBuildError with the compiler's complaints."""
        source = self._source(spec)
        sources = Sources(source.parent, INCLUDE_FOLDER)
        constants = (*spec.defines, ("THREADS", spec.threads), ("MIN_BLOCKS", spec.min_blocks))
        defines = [f"-D{name}={value}" for name, value in constants]
        digest = hashlib.sha256()
        texts = [sources.text(spec.source) or "", *sources.headers(spec.source).values()]
        texts += [(HERE / name).read_text(encoding="utf-8") for name in _EMULATOR_HEADERS]
        for part in (_machine(), *self._options, *defines, spec.name, *texts):
            digest.update(f"{len(part)}:{part}".encode())
        target = cache_folder() / f"{spec.name}-{digest.hexdigest()[:32]}.so"
        if not target.exists():
            self._build(spec, source, defines, target)
        return target

    def _build(self, spec: KernelSpec, source: Path, defines: Sequence[str], target: Path) -> None:
        # Inside an unnamed namespace nothing of the source clashes with the C library or is compiled unless used.
        unit = (
            f'#include "cuda_emulator.hpp"\nnamespace kernel_source {{ namespace {{\n#include "{source.resolve()}"\n'
            f"}} }}\nEMULATOR_ENTRY({spec.name})\n"
        )
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            made = Path(folder) / "kernel.so"
            folders = (f"-I{HERE}", f"-I{INCLUDE_FOLDER}", f"-I{source.parent}")
            command = [compiler(), *self._options, *defines, *folders, "-x", "c++", "-", "-o", str(made)]
            done = subprocess.run(command, input=unit, capture_output=True, text=True, check=False)
            if done.returncode:
                raise EmulatorBuildError(f"kernel {spec.variant} is no valid C++ here:\n{done.stderr[:4000]}")
            made.replace(target)

    def libraries(self, specs: Iterable[KernelSpec]) -> list[Path]:
        """Paths for many specs, built on all cores."""
        with ThreadPoolExecutor(max(1, available_cores())) as pool:
            return list(pool.map(self.library, specs))
