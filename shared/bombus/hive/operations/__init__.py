"""Clients of training operations on an engine: their sessions, models, operations and saved weights."""
