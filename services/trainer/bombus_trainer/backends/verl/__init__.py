"""verl's FSDP engine as a backend, on any number of ranks."""
