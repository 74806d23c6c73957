"""Converts text to tokens and back: templates, tokenizers, and readers of sampled text."""
