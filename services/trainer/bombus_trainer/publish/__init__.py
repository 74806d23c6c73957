"""What a step writes: checkpoints, and weights for the replicas."""
