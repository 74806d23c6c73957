"""Readers of sampled text. How a model writes reasoning and tool calls is determined from its chat template."""
