"""Serves an operations run: executes waiting operations in a fair order, and recovers after the trainer has ended."""
