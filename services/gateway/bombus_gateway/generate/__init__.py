"""The `/generate` API for clients that sample tokens with an episode's key, in vLLM's form or in SGLang's."""
