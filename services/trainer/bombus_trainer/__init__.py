"""The trainer: reads batches from the log, takes optimizer steps and publishes weights."""
