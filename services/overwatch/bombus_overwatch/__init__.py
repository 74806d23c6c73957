"""A terminal screen that shows a hive live: it folds the log and draws the resulting state."""
