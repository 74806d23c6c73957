"""What computes a step: the torch backend, and verl's engine."""
