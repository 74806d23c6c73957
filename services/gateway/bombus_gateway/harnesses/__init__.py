"""What is known of single harnesses: how their sub-agents and their auxiliary calls look."""
