"""Rollout groups: their queue, and the batches formed from it."""
