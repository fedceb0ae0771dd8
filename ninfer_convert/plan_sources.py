"""The checkpoints that a plan reads, and what has been found out about them so far."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ninfer_convert.allocation import stores_nvfp4
from ninfer_convert.build_options import BuildOptions
from ninfer_convert.families.qwen3_5 import Names, spelling
from ninfer_convert.hub import Need
from ninfer_convert.locate import locate
from ninfer_convert.prepacked_check import published_obstacles
from ninfer_convert.problems import Problem
from ninfer_convert.source_facts import hub_origin
from ninfer_convert.sources.adapters import open_checkpoint
from ninfer_convert.sources.gguf import GgufSource, open_gguf
from ninfer_convert.sources.gguf_frontend import compare_frontend
from ninfer_convert.sources.logical import LogicalCheckpoint
from ninfer_format import Identity, UsageError


@dataclass(frozen=True, slots=True)
class PlanSources:
    """Opened sources and findings."""

    options: BuildOptions
    name: str
    """What a person would call the model: folder or repository name of the source."""
    folder: Path
    """Where the frontend files lie."""
    checkpoint: LogicalCheckpoint
    """The model's own: the base where there is one, otherwise the source."""
    prepacked: LogicalCheckpoint | None
    """The source, where there is a base."""
    dflash: LogicalCheckpoint | None
    gguf: GgufSource | None
    """The source, where it is a GGUF file."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def folders(self) -> list[Path]:
        """Folders that nothing is written into: a GGUF file outside a Hub cache may get neighbours."""
        held = [c.folder for c in (self.checkpoint, self.prepacked, self.dflash) if c is not None]
        if self.gguf is not None and hub_origin(self.checkpoint.folder)[0] is None:
            held.remove(self.checkpoint.folder)
        return held if self.options.frontend is None else [*held, self.folder]

    @property
    def decoder(self) -> LogicalCheckpoint:
        """What decides which decoder matrices are NVFP4."""
        return self.prepacked or self.checkpoint

    @property
    def stores_nvfp4(self) -> bool:
        """Whether decoder matrices of the source are stored as NVFP4."""
        return stores_nvfp4(self.decoder, self.names_in(self.decoder))

    def names_in(self, checkpoint: LogicalCheckpoint, *, tied: bool = False) -> Names:
        """How ``checkpoint`` spells its tensors."""
        return spelling(checkpoint.tensors.keys() | checkpoint.unavailable, tied=tied)

    def published_obstacles(self, identity: Identity) -> Iterable[Problem]:
        """What keeps a prepacked folder and its base from being the sources of ``identity``, made from such a pair."""
        if self.prepacked is None:
            message = f"{identity} is made from a prepacked NVFP4 source beside its BF16 base, and no base is given"
            advice = "pass the NVFP4 folder as SOURCE and the BF16 folder with --base"
            return (Problem("identity-refused", message, "--base", advice),)
        return published_obstacles(identity, self.prepacked, self.checkpoint)


def open_sources(options: BuildOptions) -> PlanSources:
    """Open every checkpoint that ``options`` name; UsageError or SourceError if one is not there."""
    # From the Hub a plan needs no weights.
    need: Need = "headers" if options.headers_only and options.out is None else "values"
    location = locate(options.source, need)
    gguf = _open_gguf(location.gguf, options) if location.gguf is not None else None
    source = gguf.checkpoint if gguf is not None else open_checkpoint(location.folder)
    beside = [locate(path, need) if path is not None else None for path in (options.base, options.dflash)]
    base, dflash = (open_checkpoint(other.folder) if other is not None else None for other in beside)
    own, prepacked = (source, None) if base is None else (base, source)
    frontend = locate(options.frontend, "files").folder if options.frontend is not None else own.folder
    read = PlanSources(options, location.name, frontend, own, prepacked, dflash, gguf)
    read.notes.extend(found.note for found in (location, *beside) if found is not None and found.note is not None)
    read.problems.extend(own.problems)
    for label, other in (("NVFP4", prepacked), ("DFlash", dflash)):
        if other is not None:
            read.problems.extend(Problem(p.code, p.message, f"{label} {p.where}", p.advice) for p in other.problems)
    for checkpoint in (own, prepacked, dflash):
        if checkpoint is not None:
            read.notes.extend(checkpoint.notes)
            if checkpoint.ignored:
                read.notes.append(f"ignored, not named by the index: {', '.join(checkpoint.ignored)}")
    if gguf is not None:
        compare_frontend(gguf, frontend, read.problems, read.notes)
    return read


def _open_gguf(path: Path, options: BuildOptions) -> GgufSource:
    """Open a GGUF source; UsageError for options that do not go with one."""
    if options.base is not None:
        raise UsageError(f"--base goes beside a SOURCE stored as NVFP4, and {path} is a GGUF file")
    if options.frontend is None:
        raise UsageError(
            f"{path}: an artifact stores tokenizer.json, tokenizer_config.json, chat_template.jinja and "
            "generation_config.json byte for byte, and a GGUF file does not hold them; pass --frontend DIR with those "
            "of the original model"
        )
    source = open_gguf(path)
    parts = [source.checkpoint.folder / shard.file for shard in source.checkpoint.shards]
    if options.out is not None and options.out.exists() and any(options.out.samefile(part) for part in parts):
        raise UsageError(f"{options.out}: the output is the GGUF file that is read; choose another name")
    return source
