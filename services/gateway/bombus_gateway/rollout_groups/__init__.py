"""The API for Atropos's environments and trainers: environments push rollout groups, and trainers fetch batches."""
