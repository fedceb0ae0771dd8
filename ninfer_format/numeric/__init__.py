"""Meaning of stored words: one module per kind of numeric format (specs/formats.md)."""
