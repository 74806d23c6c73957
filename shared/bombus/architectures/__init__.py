"""What sets architectures of transformers apart, and whether engine and trainer compute them faithfully."""
