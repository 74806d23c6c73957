"""Training operations, executed: several models on one base, each with an adapter, a gradient and an optimizer."""
