"""The backends of a replica, all with the same protocol: torch, vLLM, and external servers."""
