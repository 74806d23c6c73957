"""The rules of training clients: their sessions, operations, runs and endpoints, and how all of it ends."""
