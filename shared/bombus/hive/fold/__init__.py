"""The fold of a hive's events: what each of them changes in its state."""
