"""External inference servers (SGLang, vLLM, or our own replicas): identify them, and make them load weights."""
