"""A vLLM or SGLang server elsewhere, reached over HTTP."""
