"""The Anthropic API: messages, and the counting of their tokens."""
