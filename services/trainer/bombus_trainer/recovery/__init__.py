"""How a trainer continues after a fault: what is retried, for how long, and from which checkpoint."""
