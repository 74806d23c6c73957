"""The rules for training clients: for their sessions, operations, runs and endpoints, and for how these end."""
