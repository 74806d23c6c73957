"""From call records to batches: sequences, packing, sharding, and samples in files."""
