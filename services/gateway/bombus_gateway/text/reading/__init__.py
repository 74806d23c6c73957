"""Readers of sampled text. The chat template shows how a model writes reasoning and tool calls."""
