"""The trainer: it reads batches from the log, makes optimizer steps and publishes weights."""
