"""The HTTP server of ``ninfer-run serve``: OpenAI chat, completions and responses, Anthropic messages, and a page."""
