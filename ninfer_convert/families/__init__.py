"""Model families: which source tensors make which stored object."""

from ninfer_convert.families.row_maps import ObjectSource, Origin, RowRun, Transform

__all__ = ["ObjectSource", "Origin", "RowRun", "Transform"]
