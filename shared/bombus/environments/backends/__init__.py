"""Backends that environments run on: simulators and sandboxes in separate processes, one for each session."""
