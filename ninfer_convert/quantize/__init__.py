"""From source words to stored planes: the canonical group encoder on torch, and word-exact copies."""
