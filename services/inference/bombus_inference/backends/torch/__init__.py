"""The embedded engine: continuous batching over a paged KV cache with prefix reuse."""
