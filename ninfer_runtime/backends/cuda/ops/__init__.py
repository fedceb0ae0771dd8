"""One file per operator: its parameter struct, the variants it needs (``specs``), and its launch."""
