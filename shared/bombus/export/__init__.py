"""`bombus export`: a policy version as a folder that transformers, peft and vLLM load, with where it came from."""
