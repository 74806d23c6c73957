"""The openai backend: an external vLLM or SGLang server, reached over HTTP."""
