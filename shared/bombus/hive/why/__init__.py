"""What waits for what in a hive, as a chain of sentences from the symptom that a user sees to its cause. Pure."""
