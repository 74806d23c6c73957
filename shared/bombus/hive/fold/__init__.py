"""The fold of a hive's events: how each event changes its state."""
