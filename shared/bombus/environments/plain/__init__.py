"""Environments that are plain classes: their public methods are tools, and some methods say what a rollout is worth."""
