"""What can be learned from an ended episode: its calls as lines of tokens, and how its reward compares with others."""
