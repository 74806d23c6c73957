"""How a trainer goes on after a fault: what is tried again, for how long, and from which checkpoint."""
