"""Unmodified agent harnesses against a real hive, with an engine whose tokens are scripted: `make test-harnesses`."""
