"""Weight files: models by name, deltas, LoRA adapters, and whether a tokenizer fits a model."""
