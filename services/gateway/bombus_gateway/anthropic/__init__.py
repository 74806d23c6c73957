"""The Anthropic door: messages, and the counting of their tokens."""
