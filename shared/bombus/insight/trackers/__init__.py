"""Experiment trackers as consumers of the log: each completed step of a run exactly once to each tracker of its job."""
