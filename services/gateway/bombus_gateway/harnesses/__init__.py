"""What is known about individual harnesses: how their sub-agents and their auxiliary calls look."""
