"""Rollout groups that others collect: what is queued of them, and the batches that are made of it."""
