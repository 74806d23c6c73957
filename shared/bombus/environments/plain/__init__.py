"""Environments that are plain classes: their public methods are tools, and decorated methods compute rewards and
metrics."""
