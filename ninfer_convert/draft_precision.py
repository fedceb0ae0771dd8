"""What a plan says about draft layers that are stored in few bits: they cost speed later, silently."""

from ninfer_format import NUMERIC_FORMATS, Inventory, encoded_size
from ninfer_format.formats import ROW_SPLIT

SAFE_BITS = 8
SAFE_FORMAT = "W8G32_F16S"


def draft_precision_notes(inventory: Inventory) -> list[str]:
    """A note where MTP matrices have fewer than 8 bits: how many, and how many bytes 8 bits would add."""
    low = [
        entry
        for entry in inventory.tensors
        if entry.name.startswith("mtp/")
        and NUMERIC_FORMATS[entry.format].kind == "grouped"
        and NUMERIC_FORMATS[entry.format].bits < SAFE_BITS
    ]
    if not low:
        return []
    more = sum(encoded_size(SAFE_FORMAT, ROW_SPLIT, entry.shape) - entry.n_bytes for entry in low)
    formats = ", ".join(sorted({entry.format for entry in low}))
    return [
        f"the recipe stores {len(low)} MTP matrices in {formats}: their drafts are rejected more often, which slows "
        f"speculative decoding without any error; {SAFE_FORMAT} would take {more:,} bytes more"
    ]
