"""The API of Atropos's environments and trainers: rollout groups come in, batches go out."""
