"""How architectures in transformers differ, and checks that the engine and the trainer compute them correctly."""
