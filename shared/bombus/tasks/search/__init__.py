"""Questions that a model answers by searching: `search`, with a small local index, your own index, or Google."""
