"""Prompts in and text out: tokenizer, chat template, messages, and the chain of stages over generated tokens."""
