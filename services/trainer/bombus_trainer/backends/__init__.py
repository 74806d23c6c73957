"""The backends that compute a step: torch, and verl's engine."""
