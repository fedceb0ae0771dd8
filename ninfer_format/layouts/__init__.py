"""Where stored words lie: one module per storage layout (specs/layouts.md)."""
