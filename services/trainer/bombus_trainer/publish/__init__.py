"""Writes the results of a step: checkpoints, and weights for the replicas."""
