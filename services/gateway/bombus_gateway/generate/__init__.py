"""The API of clients that sample tokens at `/generate` with an episode's key, in vLLM's form or in SGLang's."""
