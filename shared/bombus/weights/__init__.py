"""Files of weights: models by name, deltas, LoRA adapters, and whether a tokenizer fits."""
