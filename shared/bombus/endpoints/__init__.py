"""External inference servers (SGLang, vLLM, or our own replicas): identify them, and let them load weights."""
