"""Questions that a model answers by searching: `search`, with a small local index, an index of your own, or Google."""
