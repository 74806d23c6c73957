"""LoRA adapters in the torch backend: the engine's own policy's adapter, and others that are served beside it."""
