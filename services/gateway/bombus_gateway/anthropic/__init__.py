"""The Anthropic API: messages and token counting."""
