"""The inference replica: continuous batching over transformers' own decoder models, behind HTTP and the bus."""
