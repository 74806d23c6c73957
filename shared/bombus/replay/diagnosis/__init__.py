"""Diagnosis: finds out from a run's events what is wrong with its learning. Pure."""
