"""An engine's clients of training operations: their sessions, models, operations and saved weights."""
