"""The rules of rollout-group runs: environments push rollout groups, and a trainer takes them as batches (R16)."""
