"""Inference servers elsewhere, SGLang's, vLLM's or replicas of ours: what they are, and how they get weights."""
