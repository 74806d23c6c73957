"""Questions that a model answers by searching: `search`, on a small local index, your own index, or Google."""
