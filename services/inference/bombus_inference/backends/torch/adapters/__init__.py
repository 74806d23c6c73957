"""LoRA adapters in the torch backend: that of the engine's own policy, and others that are served beside it."""
