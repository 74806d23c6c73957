"""Advantages, losses, corrections and KL estimates, each a plain function of tensors or numbers."""
