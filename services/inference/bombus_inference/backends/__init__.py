"""The backends of a replica behind one protocol: torch, vLLM, and external servers."""
