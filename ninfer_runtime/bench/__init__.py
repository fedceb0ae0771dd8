"""Synthetic artifacts and benchmarks: ``ninfer-run bench`` (specs/benchmarks.md)."""
