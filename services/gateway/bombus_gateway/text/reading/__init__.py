"""Readers of sampled text: how a model writes reasoning and tool calls is found out from its chat template."""
