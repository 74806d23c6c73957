"""The vllm backend: vLLM's own server as a child process, with weights updated in place."""
