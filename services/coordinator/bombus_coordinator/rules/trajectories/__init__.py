"""The rules of runs of trajectories: environments push rollout groups, and a trainer takes them as batches (R16)."""
