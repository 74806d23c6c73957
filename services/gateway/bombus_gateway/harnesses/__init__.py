"""What we know about individual harnesses: how to recognize their sub-agents and auxiliary calls."""
