"""Weight files: models by name, deltas, LoRA adapters, and the check of whether a tokenizer fits a model."""
