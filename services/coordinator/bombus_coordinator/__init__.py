"""The coordinator: reads the inbox in order, makes decisions, and is the only process that writes events."""
