"""The `/generate` API, in vLLM's or SGLang's form, for clients that sample tokens with an episode's key."""
