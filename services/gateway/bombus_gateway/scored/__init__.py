"""The door of Atropos's environments and trainers: scored groups come in, batches go out."""
