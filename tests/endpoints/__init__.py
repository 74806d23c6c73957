"""Inference servers elsewhere."""
