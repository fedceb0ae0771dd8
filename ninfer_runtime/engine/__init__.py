"""From requests to token events, over any ``Program``."""
