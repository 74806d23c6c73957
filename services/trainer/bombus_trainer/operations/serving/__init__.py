"""Serve an operations run: execute the waiting operations in a fair order, and recover after the trainer ends."""
