"""The coordinator: reads the inbox in order, decides, and is the only author of events."""
