"""What waits for what in a hive, as a chain of sentences from what a user sees to the cause. Pure."""
