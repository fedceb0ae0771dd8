"""What a conversion is asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ninfer_convert.recipe_file import RecipeFile
from ninfer_format import Identity, Recipe


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the user asked for; ``plan`` and ``build`` take the same options."""

    source: Path
    """Checkpoint folder, GGUF file, ``hf://org/name``, or a Hub name that is in the local cache."""
    out: Path | None = None
    identity: Identity | None = None
    recipe: str | RecipeFile | Recipe | None = None
    """Name of a built-in recipe, a mixed one from a file, or that of an artifact."""
    model_id: str | None = None
    dflash: Path | None = None
    ranking: Path | None = None
    frontend: Path | None = None
    """Folder of the frontend files; None: that of the checkpoint. A GGUF file needs one."""
    base: Path | None = None
    """The BF16 checkpoint beside a prepacked NVFP4 ``source``: config, frontend files, all that is not NVFP4."""
    method: str = "max"
    """One of ``coding.METHODS``: how codes and scales are chosen."""
    activation_stats: Path | None = None
    """What ``ninfer-run calibrate`` wrote: activation divisors, and weights of errors for method ``mse``."""
    device: Literal["cpu", "cuda"] = "cpu"
    no_mtp: bool = False
    no_vision: bool = False
    resume: bool = False
    force: bool = False
    jobs: int = 0
    """Worker threads; 0 = one per usable CPU."""
    headers_only: bool = False
    """Of a source on the Hub download no weights: enough for a plan, not for what reads values."""
