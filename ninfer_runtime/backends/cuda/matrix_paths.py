"""Which path every group of matrices takes, in words: what the start says."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from ninfer_format.roles import role_of
from ninfer_runtime.backends.cuda.packing import TILE_ROWS, PackedMatrix

Fp4Prompts = Literal["a16", "a4", "twin"]
"""What prompt chunks multiply NVFP4 matrices by: rows as they are, FP4 rows with the product of the card, or the same
rows as bf16."""
_FP4_PROMPTS: Mapping[Fp4Prompts, str] = MappingProxyType(
    {
        "a16": "NVFP4 in prompts: fast, with bf16 rows",
        "a4": "NVFP4 in prompts: fast, with FP4 rows",
        "twin": "NVFP4 in prompts: portable twin with FP4 rows as bf16, the card has no FP4 product",
    }
)


def matrix_paths(matrices: Sequence[PackedMatrix], fp4_prompts: Fp4Prompts = "a16", *, int8: bool = False) -> str:
    """Groups by role and format; fast where matrices fill their tiles, generic where rows or columns are padded."""
    roles = list(dict.fromkeys(_group(matrix.name) for matrix in matrices))
    fast: dict[str, int] = {}
    generic: dict[str, int] = {}
    for matrix in sorted(matrices, key=lambda matrix: roles.index(_group(matrix.name))):
        group = f"{_group(matrix.name)} {matrix.format.partition('G')[0]}"
        if matrix.n_tiles * TILE_ROWS == matrix.n_rows and matrix.k_padded == matrix.k:
            fast[group] = fast.get(group, 0) + 1
        else:
            group += f" [{matrix.n_rows}, {matrix.k}] as [{matrix.n_tiles * TILE_ROWS}, {matrix.k_padded}]"
            generic[group] = generic.get(group, 0) + 1
    parts = [
        f"{path}: {', '.join(f'{n} {group}' for group, n in groups.items())}"
        for path, groups in (("fast", fast), ("generic, padded to whole tiles", generic))
        if groups
    ]
    if any(matrix.tile.floating for matrix in matrices):
        parts.append(_FP4_PROMPTS[fp4_prompts])
    if int8 and any(matrix.tile.group and not matrix.tile.floating for matrix in matrices):
        parts.append("integer codes of the layers in prompts: fast, with INT8 rows")
    return "; ".join(parts)


def _group(name: str) -> str:
    """``text/layers/7/mlp/down`` → ``mlp/down``."""
    role = role_of(name)[0]
    for prefix in ("text/layers/*/", "text/"):
        role = role.removeprefix(prefix)
    return role
