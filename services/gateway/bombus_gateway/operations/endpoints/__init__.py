"""Inference servers elsewhere: they are registered, and get weights that are put in sync."""
