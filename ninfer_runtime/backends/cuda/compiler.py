"""Kernels from source to cubin, with NVRTC and without a card; every cubin is kept, keyed by all that made it.

A cache entry is ``KEY.cubin`` and ``KEY.json``: ``KEY`` is the SHA-256 of the kernel's text, the texts of all headers
it reaches, the options and the NVRTC version. The JSON is written last and holds the cubin's digest, so a torn or
damaged entry is recognised and built again.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ninfer_format.errors import NinferError, UnsupportedError
from ninfer_format.hashing import available_cores
from ninfer_runtime.backends.cuda.nvrtc import Nvrtc, nvrtc

HERE = Path(__file__).parent
KERNEL_FOLDER = HERE / "kernels"
INCLUDE_FOLDER = HERE / "include"

# No fast-math and no flush to zero: the reference has denormals and IEEE division.
# Without the second one NVRTC 13.0 takes a lambda inside a kernel for host code.
_OPTIONS = (
    "-std=c++17",
    "--device-as-default-execution-space",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--fmad=true",
    "--ptxas-options=-v",
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_WARNING = re.compile(r"(?:^|[ :])warning\b")
_ARCH = re.compile(r"sm_(\d+)a?")
_OLDEST_CAPABILITY = 80
_FIRST_WITH_VARIANTS = 90  # from here on the "a" target alone has the instructions of its own generation
_ENTRY_FORMAT = 1


class CompileError(NinferError):
    """A kernel that does not compile; the message names kernel, variant, target, first complaint and the full log."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One compiled variant of one kernel.

    source        file under ``kernels/``
    name          entry point (``extern "C"``)
    defines       compile-time constants, passed as ``-DNAME=value``
    threads       block size; also ``-DTHREADS``
    shared_bytes  dynamic shared memory per block
    min_blocks    second argument of ``__launch_bounds__``; also ``-DMIN_BLOCKS``
    """

    source: str
    name: str
    defines: tuple[tuple[str, int | str], ...] = ()
    threads: int = 256
    shared_bytes: int = 0
    min_blocks: int = 1

    @property
    def variant(self) -> str:
        """The variant in words, unique among the specs of an entry point: ``name[N=5120,K=6144]x256``."""
        constants = ",".join(f"{name}={value}" for name, value in self.defines)
        at_least = f"/{self.min_blocks}" if self.min_blocks != 1 else ""
        return f"{self.name}[{constants}]x{self.threads}{at_least}"


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one spec for one target: ``image`` (an ELF file), the compiler's ``log``, and its warnings."""

    image: bytes
    log: str
    warnings: tuple[str, ...]
    path: Path


def arch_for(capability: tuple[int, int]) -> str:
    """Compile target of a card: ``sm_86``, ``sm_90a``, ``sm_120a``. UnsupportedError below 8.0."""
    number = 10 * capability[0] + capability[1]
    if number < _OLDEST_CAPABILITY:
        found = f"{capability[0]}.{capability[1]}"
        raise UnsupportedError(f"the card has compute capability {found}, 8.0 or newer is needed")
    return f"sm_{number}a" if number >= _FIRST_WITH_VARIANTS else f"sm_{number}"


def capability_of(arch: str) -> int:
    """10 · major + minor of a target such as ``sm_120a``. UnsupportedError for anything else."""
    match = _ARCH.fullmatch(arch)
    if match is None or int(match[1]) < _OLDEST_CAPABILITY:
        raise UnsupportedError(f"unknown target {arch!r}, expected for example sm_80, sm_90a or sm_120a")
    return int(match[1])


@cache
def _fallback_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="ninfer-kernels-"))


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$NINFER_CACHE``, ``$XDG_CACHE_HOME/ninfer`` or ``~/.cache/ninfer``."""
    if own := os.environ.get("NINFER_CACHE"):
        return Path(own) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "ninfer" / "kernels"
    except RuntimeError:  # a user without a home
        return _fallback_folder()


def say(line: str) -> None:
    """One line on stderr."""
    sys.stderr.write(line + "\n")


def usable_folder(folder: Path, report: Callable[[str], None] = say) -> Path:
    """``folder`` if files can be made in it, otherwise a temporary one, with one line that says so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        other = _fallback_folder()
        report(f"warning: compiled kernels go to {other}, because {folder} cannot be written: {error.strerror}")
        return other


def _write_atomically(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Sources:
    """Kernel texts with the headers each of them reaches; the files are read once."""

    def __init__(self, kernels: Path = KERNEL_FOLDER, include: Path = INCLUDE_FOLDER) -> None:
        self._folders = (kernels, include)
        self._texts: dict[str, str | None] = {}

    def text(self, name: str) -> str | None:
        """Text of a kernel or header, None when there is no such file."""
        if name not in self._texts:
            found = next((path for folder in self._folders if (path := folder / name).is_file()), None)
            self._texts[name] = None if found is None else found.read_text(encoding="utf-8")
        return self._texts[name]

    def headers(self, name: str) -> dict[str, str]:
        """Every header that ``name`` reaches, by its ``#include`` name; a missing one is the compiler's to report."""
        reached: dict[str, str] = {}
        waiting = [name]
        while waiting:
            for included in _INCLUDE.findall(self.text(waiting.pop()) or ""):
                text = self.text(included)
                if text is not None and included not in reached:
                    reached[included] = text
                    waiting.append(included)
        return dict(sorted(reached.items()))


class Compiler:
    """Compiles specs for one target; safe to call from several threads."""

    def __init__(
        self,
        arch: str,
        *,
        sources: Sources | None = None,
        folder: Path | None = None,
        line_info: bool = False,
        report: Callable[[str], None] = say,
    ) -> None:
        """``folder`` keeps the cubins (default ``cache_folder()``); ``report`` receives warnings.

        Raises MissingExtraError without NVRTC, UnsupportedError when it does not know the target.
        """
        self.arch = arch
        self._nvrtc: Nvrtc = nvrtc()
        if capability_of(arch) not in self._nvrtc.capabilities():
            major, minor = self._nvrtc.version
            raise UnsupportedError(f"NVRTC {major}.{minor} does not know {arch}; update nvidia-cuda-nvrtc")
        self._sources = sources or Sources()
        self._report = report
        self._line_info = line_info
        self.folder = usable_folder(folder or cache_folder(), report)

    def options(self, spec: KernelSpec) -> tuple[str, ...]:
        """Everything NVRTC is told about a spec, in a fixed order."""
        constants = (*spec.defines, ("THREADS", spec.threads), ("MIN_BLOCKS", spec.min_blocks))
        line_info = ("-lineinfo",) if self._line_info else ()
        return (f"-arch={self.arch}", *_OPTIONS, *line_info, *(f"-D{name}={value}" for name, value in constants))

    def _key(self, spec: KernelSpec, text: str, headers: Mapping[str, str]) -> str:
        parts = [*self._nvrtc.version, *self.options(spec), spec.source, text]
        for name, content in headers.items():
            parts += [name, content]
        digest = hashlib.sha256()
        for part in map(str, parts):
            digest.update(f"{len(part)}:{part}".encode())
        return f"{Path(spec.source).stem}-{self.arch}-{digest.hexdigest()[:32]}"

    def _stored(self, path: Path) -> Cubin | None:
        try:
            entry = json.loads(path.with_suffix(".json").read_bytes())
            image = path.read_bytes()
            if entry["format"] != _ENTRY_FORMAT or hashlib.sha256(image).hexdigest() != entry["sha256"]:
                return None
            return Cubin(image, str(entry["log"]), tuple(entry["warnings"]), path)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _store(self, cubin: Cubin) -> None:
        digest = hashlib.sha256(cubin.image).hexdigest()
        entry = {"format": _ENTRY_FORMAT, "sha256": digest, "warnings": cubin.warnings, "log": cubin.log}
        try:
            _write_atomically(cubin.path, cubin.image)
            _write_atomically(cubin.path.with_suffix(".json"), json.dumps(entry).encode())
        except OSError as error:
            self._report(f"warning: a compiled kernel was not kept: {cubin.path}: {error.strerror}")

    def compile(self, spec: KernelSpec) -> Cubin:
        """The cubin of a spec, from the cache or freshly compiled. CompileError when the source is refused."""
        text = self._sources.text(spec.source)
        if text is None:
            raise CompileError(f"kernel {spec.variant}: this installation has no {spec.source}; install it again")
        headers = self._sources.headers(spec.source)
        path = self.folder / f"{self._key(spec, text, headers)}.cubin"
        if (stored := self._stored(path)) is not None:
            return stored
        made = self._nvrtc.compile(spec.source, text, headers, self.options(spec))
        if made.cubin is None:
            raise self._refusal(spec, made.log, path.with_suffix(".log"))
        warnings = tuple(line.strip() for line in made.log.splitlines() if _WARNING.search(line))
        for warning in warnings:
            self._report(f"warning: kernel {spec.variant} for {self.arch}: {warning}")
        cubin = Cubin(made.cubin, made.log, warnings, path)
        self._store(cubin)
        return cubin

    def _refusal(self, spec: KernelSpec, log: str, path: Path) -> CompileError:
        complaints = (line.strip() for line in log.splitlines() if "error" in line or "fatal" in line)
        first = next(complaints, log.strip().partition("\n")[0] or "no reason given")
        try:
            _write_atomically(path, log.encode())
            where = f"full log: {path}"
        except OSError:
            where = "the full log could not be written"
        return CompileError(f"kernel {spec.variant} does not compile for {self.arch}: {first} ({where})")

    def compile_all(self, specs: Iterable[KernelSpec], jobs: int | None = None) -> dict[KernelSpec, Cubin]:
        """The cubins of many specs, made on ``jobs`` threads (default: all cores); the first CompileError ends it."""
        wanted = list(dict.fromkeys(specs))
        groups: dict[tuple[str, tuple[str, ...]], list[KernelSpec]] = {}
        for spec in wanted:
            groups.setdefault((spec.source, self.options(spec)), []).append(spec)
        with ThreadPoolExecutor(max(1, jobs or available_cores())) as pool:
            futures = [pool.submit(self.compile, members[0]) for members in groups.values()]
            try:
                made = [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()
        of_group = dict(zip(groups, made, strict=True))
        return {spec: of_group[spec.source, self.options(spec)] for spec in wanted}
