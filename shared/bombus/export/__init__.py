"""`bombus export`: write a policy version to a folder that transformers, peft and vLLM load, with a model card."""
