"""The torch backend: continuous batching over a paged KV cache with prefix reuse."""
