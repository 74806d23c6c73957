"""The API of Atropos's environments and trainers: environments push rollout groups, trainers fetch batches."""
