"""LoRA adapters in the torch backend: the adapter of the engine's own policy, and others that are served beside it."""
