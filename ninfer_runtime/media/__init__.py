"""Pictures and videos of requests: where they may come from, and how they are brought in."""
