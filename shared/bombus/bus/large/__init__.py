"""Bodies that are larger than one message: training operations and their results."""
