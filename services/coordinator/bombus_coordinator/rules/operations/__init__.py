"""The rules for training clients: their sessions, operations, runs and endpoints, and how these end."""
