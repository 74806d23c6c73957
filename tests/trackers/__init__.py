"""Trackers with their own packages, offline, in an environment of their own (`make test-trackers`)."""
