"""The rules of runs of trajectories: environments push scored groups, and a trainer takes them as batches (R16)."""
