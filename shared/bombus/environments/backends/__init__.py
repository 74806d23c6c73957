"""Backends for environments: simulators and sandboxes in separate processes, one for each session."""
