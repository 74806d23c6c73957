"""The OpenAI door: chat completions, completions and models."""
