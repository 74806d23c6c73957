"""Engines behind one protocol: torch, vLLM, and servers that somebody else runs."""
