"""Environments that agents act in, and what runs an agent in one of them."""
