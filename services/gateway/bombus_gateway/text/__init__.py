"""Text to tokens and back: templates, tokenizers, and readers of what was sampled."""
